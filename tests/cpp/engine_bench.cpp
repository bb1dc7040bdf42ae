// A benchmark of the engine without torch and Python. It prints the median, 95th percentile and
// mean time of a call on rank 0. Ranks are processes, and MYCOLL_* variables have their usual
// effect.
//
//   engine_bench OP [bytes] [ranks] [calls]
//
//   OP: barrier all_reduce reduce broadcast all_gather gather reduce_scatter scatter all_to_all
//       pingpong sendrecv (two ranks, both ways at the same time)
//
//   engine_bench init [ranks of a host] [ranks] [rounds]
//
//   Prints how long a group takes to be made and to run a barrier, plain and encrypted in turns.
//   The processes pretend to be on several hosts.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine/communicator.h"
#include "engine/engine.h"
#include "processes.h"
#include "transport/tcp/tls.h"

using namespace mycoll;

namespace {

using Clock = std::chrono::steady_clock;

void check(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "engine_bench: %s\n", status.message().c_str());
  _exit(1);
}

const std::map<std::string, OpKind> kCollectives = {
    {"barrier", OpKind::kBarrier},
    {"all_reduce", OpKind::kAllReduce},
    {"reduce", OpKind::kReduce},
    {"broadcast", OpKind::kBroadcast},
    {"all_gather", OpKind::kAllGather},
    {"gather", OpKind::kGather},
    {"reduce_scatter", OpKind::kReduceScatter},
    {"scatter", OpKind::kScatter},
    {"all_to_all", OpKind::kAllToAll},
};

// The time of one round; shared between processes.
struct Meeting {
  std::atomic<int> ready;
  std::atomic<double> millis;
};

// Processes that begin at the same time make a group and run a barrier.
double millisOfInit(int ranks, int ranksOfHost, const std::shared_ptr<const Tls>& tls) {
  const test::ScopedFolder folder;
  const auto store = std::make_shared<test::FolderStore>(folder.path());
  auto* const meeting = static_cast<Meeting*>(
      mmap(nullptr, sizeof(Meeting), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  for (int rank = 0; rank < ranks; ++rank) {
    if (fork() != 0) continue;
    MeshOptions mesh;
    mesh.storeHost = "127.0.0.1";
    mesh.host = " host " + std::to_string(rank / ranksOfHost);
    mesh.tls = tls;
    GroupOptions options;
    options.name = "engine_bench";
    options.rank = rank;
    options.ranks = ranks;
    for (++meeting->ready; meeting->ready < ranks;) usleep(100);
    const Clock::time_point start = Clock::now();
    std::shared_ptr<Engine> engine;
    check(Engine::create(mesh, &engine));
    std::shared_ptr<Communicator> group;
    check(Communicator::create(options, store, engine, &group));
    Call call;
    call.kind = OpKind::kBarrier;
    check(group->wait(group->submit(std::move(call), nullptr, true), Deadline::never()));
    const std::chrono::duration<double, std::milli> took = Clock::now() - start;
    if (rank == 0) meeting->millis = took.count();
    group->close(Deadline::after(std::chrono::milliseconds(2000)));
    _exit(0);
  }
  for (int status = 0; wait(&status) > 0;) {
    if (status != 0) _exit(1);
  }
  const double millis = meeting->millis;
  munmap(meeting, sizeof(Meeting));
  return millis;
}

int benchInit(int ranksOfHost, int ranks, int rounds) {
  std::shared_ptr<const Tls> tls;
  check(Tls::make("a secret of the job", &tls));
  std::vector<double> plain, encrypted, ratios;
  for (int round = 0; round < rounds; ++round) {
    plain.push_back(millisOfInit(ranks, ranksOfHost, nullptr));
    encrypted.push_back(millisOfInit(ranks, ranksOfHost, tls));
    ratios.push_back(encrypted.back() / plain.back());
  }
  for (auto* each : {&plain, &encrypted, &ratios}) std::sort(each->begin(), each->end());
  const size_t half = ratios.size() / 2, quarter = ratios.size() / 4;
  std::printf(
      "init of %d ranks, %d on each host: plain %.1f ms, encrypted %.1f, ratio %.2f [%.2f %.2f]\n",
      ranks, ranksOfHost, plain[half], encrypted[half], ratios[half], ratios[quarter],
      ratios[ratios.size() - 1 - quarter]);
  return 0;
}

struct Bench {
  std::string op;
  size_t bytes;
  int ranks;
  int calls;

  void collective(Communicator& group, OpKind kind, char* data) const {
    Call call;
    call.kind = kind;
    call.root = 0;
    call.dtype = DType::kFloat32;
    call.reduceOp = ReduceOp::kSum;
    call.elementBytes = sizeof(float);
    const bool isRoot = group.rank() == 0;
    const size_t part = bytes / static_cast<size_t>(ranks) & ~size_t{63};
    char* const other = data + bytes;  // the buffer has room for two
    const auto parts = [&](Spans& spans, char* begin) {
      for (int rank = 0; rank < ranks; ++rank) {
        spans.push_back({begin + static_cast<size_t>(rank) * part, part});
      }
    };
    switch (kind) {
      case OpKind::kAllReduce:
      case OpKind::kReduce:
        call.in.push_back({data, bytes});
        if (kind == OpKind::kAllReduce || isRoot) call.out.push_back({data, bytes});
        break;
      case OpKind::kBroadcast:
        if (isRoot) call.in.push_back({data, bytes});
        call.out.push_back({data, bytes});
        break;
      case OpKind::kAllGather:
      case OpKind::kGather:
        call.in.push_back({data + static_cast<size_t>(group.rank()) * part, part});
        if (kind == OpKind::kAllGather || isRoot) parts(call.out, other);
        break;
      case OpKind::kReduceScatter:
      case OpKind::kScatter:
        if (kind == OpKind::kReduceScatter || isRoot) parts(call.in, data);
        call.out.push_back({other + static_cast<size_t>(group.rank()) * part, part});
        break;
      case OpKind::kAllToAll:
        parts(call.in, data);
        parts(call.out, other);
        break;
      default: break;
    }
    check(group.wait(group.submit(std::move(call), nullptr, true), Deadline::never()));
  }

  void message(Communicator& group, char* data, bool isSend) const {
    const int peer = 1 - group.rank();
    const Span span{data, bytes};
    const OpPtr done = isSend ? group.send({span, peer, 0, DType::kFloat32}, nullptr, true)
                              : group.recv({span, peer, 0, DType::kFloat32}, nullptr, true);
    check(group.wait(done, Deadline::never()));
  }

  void exchange(Communicator& group, char* data) const {
    const int peer = 1 - group.rank();
    const OpPtr sent = group.send({{data, bytes}, peer, 0, DType::kFloat32}, nullptr, false);
    const OpPtr received =
        group.recv({{data + bytes, bytes}, peer, 0, DType::kFloat32}, nullptr, false);
    check(group.wait(sent, Deadline::never()));
    check(group.wait(received, Deadline::never()));
  }

  void run(int rank, const std::shared_ptr<Store>& store) const {
    GroupOptions options;
    options.name = "engine_bench";
    options.rank = rank;
    options.ranks = ranks;
    options.storeHost = "127.0.0.1";
    std::shared_ptr<Communicator> group;
    check(Communicator::create(options, store, nullptr, &group));
    const size_t each = std::max<size_t>((bytes + 63) & ~size_t{63}, 64) * 2;
    const size_t copies =
        getenv("COLD") ? std::max<size_t>(1, std::min<size_t>(4096, (size_t{96} << 20) / each)) : 1;
    std::vector<char> all(each * copies);
    std::vector<double> micros;
    for (int i = -std::max(20, calls / 10); i < calls; ++i) {
      char* const data = all.data() + static_cast<size_t>(i + 1000000) % copies * each;
      const Clock::time_point start = Clock::now();
      if (op == "pingpong") {
        message(*group, data, rank == 0);
        message(*group, data, rank != 0);
      } else if (op == "sendrecv") {
        exchange(*group, data);
      } else {
        collective(*group, kCollectives.at(op), data);
      }
      const std::chrono::duration<double, std::micro> took = Clock::now() - start;
      if (i >= 0) micros.push_back(took.count());
    }
    if (rank == 0) report(micros);
    group->close(Deadline::after(std::chrono::milliseconds(2000)));
  }

  void report(std::vector<double>& micros) const {
    double sum = 0;
    for (double each : micros) sum += each;
    std::sort(micros.begin(), micros.end());
    const size_t count = micros.size();
    std::printf("%s, %zu bytes, %d ranks: median %.2f us, p95 %.2f, mean %.2f\n", op.c_str(), bytes,
                ranks, micros[count / 2], micros[count * 95 / 100],
                sum / static_cast<double>(count));
    std::fflush(stdout);
  }
};

}  // namespace

int main(int argc, char** argv) {
  auto number = [&](int at, long otherwise) { return argc > at ? atol(argv[at]) : otherwise; };
  if (argc > 1 && std::string("init") == argv[1]) {
    return benchInit(static_cast<int>(number(2, 8)), static_cast<int>(number(3, 64)),
                     static_cast<int>(number(4, 15)));
  }
  const Bench bench{argc > 1 ? argv[1] : "all_reduce", static_cast<size_t>(number(2, 4)),
                    static_cast<int>(number(3, 2)), static_cast<int>(number(4, 10'000))};
  const bool isMessages = bench.op == "pingpong" || bench.op == "sendrecv";
  if (isMessages ? bench.ranks != 2 : kCollectives.count(bench.op) == 0) {
    std::fprintf(stderr, "engine_bench: no operation '%s' with %d ranks\n", bench.op.c_str(),
                 bench.ranks);
    return 2;
  }
  const test::ScopedFolder folder;
  const auto store = std::make_shared<test::FolderStore>(folder.path());
  for (int rank = 0; rank < bench.ranks; ++rank) {
    if (fork() == 0) {
      bench.run(rank, store);
      _exit(0);
    }
  }
  int failures = 0;
  for (int status = 0; wait(&status) > 0;) failures += status != 0;
  return failures == 0 ? 0 : 1;
}
