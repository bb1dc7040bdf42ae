// Every collective over the stand-ins, against plain references: types, operations, sizes, splits.
#include <numeric>

#include "nccl_world.h"
#include "reduce_reference.h"

namespace mycoll::nccl::world {
namespace {

constexpr size_t kSizes[] = {0, 1, 7, 1000, 40000};  // the last is longer than the stand-in's rings

// Small values, so that products stay finite and differ by rank.
std::vector<char> numbers(DType dtype, size_t count, int rank) {
  const bool isComplex = dtype == DType::kComplex64 || dtype == DType::kComplex128;
  const size_t lanes = isComplex ? 2 * count : count;
  std::vector<char> content(count * elementSize(dtype));
  for (size_t i = 0; i < lanes; ++i) {
    const int value = static_cast<int>((i + 3 * rank) % 7) + 1;
    switch (dtype) {
      case DType::kFloat32:
      case DType::kComplex64: reference::put<float>(content.data(), i, value * 0.5f); break;
      case DType::kFloat64:
      case DType::kComplex128: reference::put<double>(content.data(), i, value * 0.5); break;
      case DType::kBool: content[i] = static_cast<char>((i + rank) % 3 == 0); break;
      default:
        if (reference::isFormat(dtype)) {
          const uint32_t code = reference::formatOf(dtype).encode(value * 0.5f);
          std::memcpy(content.data() + i * elementSize(dtype), &code, elementSize(dtype));
        } else {
          const int64_t number = value;
          std::memcpy(content.data() + i * elementSize(dtype), &number, elementSize(dtype));
        }
    }
  }
  return content;
}

std::vector<char> reduced(DType dtype, ReduceOp op, size_t count, int ranks) {
  std::vector<std::vector<char>> inputs;
  reference::Inputs pointers;
  for (int rank = 0; rank < ranks; ++rank) {
    inputs.push_back(numbers(dtype, count, rank));
    pointers.push_back(inputs.back().data());
  }
  std::vector<char> expected(count * elementSize(dtype));
  for (size_t i = 0; i < count; ++i) {
    reference::reduceElement(dtype, op, pointers, i, ranks, expected.data());
  }
  return expected;
}

bool canReduce(DType dtype, ReduceOp op) {
  if (!isSupported(dtype, op) || dtype == DType::kInt16 || dtype == DType::kUInt16) return false;
  if (dtype == DType::kBool) return op != ReduceOp::kBXor;
  if (op >= ReduceOp::kBAnd) return false;
  const bool isComplex = dtype == DType::kComplex64 || dtype == DType::kComplex128;
  return !isComplex || op != ReduceOp::kProduct;
}

TEST(NcclReduce, everyTypeAndOperation) {
  World world(StandIn::full(), 3);
  world.run([](Rank& rank) {
    const Library& library = rank.comm->library();
    for (int type = 0; type < static_cast<int>(DType::kCount); ++type) {
      for (int which = 0; which < static_cast<int>(ReduceOp::kCount); ++which) {
        const DType dtype = static_cast<DType>(type);
        const ReduceOp op = static_cast<ReduceOp>(which);
        Buffer in(numbers(dtype, 37, rank.comm->rank()), rank.stream);
        Buffer out(in.span().bytes, rank.stream);
        const Call call = callOf(OpKind::kAllReduce, dtype, {in.span()}, {out.span()}, -1, op);
        const Status answer = check(library, call);
        EXPECT_EQ(answer.ok(), canReduce(dtype, op));
        if (!answer.ok()) {
          EXPECT_EQ(answer.code(), Code::kUnsupported);
          EXPECT(answer.message().find("MYCOLL_CUDA=host") != std::string::npos);
          EXPECT_EQ(enqueue(*rank.comm, call, rank.stream).code(), Code::kUnsupported);
          continue;
        }
        ASSERT_OK(enqueue(*rank.comm, call, rank.stream));
        if (out.read() != reduced(dtype, op, 37, 3)) {
          test::fail(__FILE__, __LINE__, std::string(name(dtype)) + " " + name(op));
        }
      }
    }
    EXPECT_OK(rank.comm->check());
  });
}

TEST(NcclReduce, everySizeAndWorld) {
  for (int ranks = 1; ranks <= 4; ++ranks) {
    World world(StandIn::full(), ranks);
    world.run([ranks](Rank& rank) {
      for (size_t count : kSizes) {
        const std::vector<char> expected = reduced(DType::kFloat32, ReduceOp::kSum, count, ranks);
        Buffer inPlace(numbers(DType::kFloat32, count, rank.comm->rank()), rank.stream);
        ASSERT_OK(
            enqueue(*rank.comm,
                    callOf(OpKind::kAllReduce, DType::kFloat32, {inPlace.span()}, {inPlace.span()}),
                    rank.stream));
        EXPECT(inPlace.read() == expected);

        for (int root = 0; root < ranks; ++root) {
          const bool isRoot = rank.comm->rank() == root;
          Buffer in(numbers(DType::kFloat32, count, rank.comm->rank()), rank.stream);
          Buffer out(pattern(count * 4, 99), rank.stream);
          std::vector<Span> outs;
          if (isRoot) outs.push_back(out.span());
          ASSERT_OK(enqueue(*rank.comm,
                            callOf(OpKind::kReduce, DType::kFloat32, {in.span()}, outs, root),
                            rank.stream));
          EXPECT(out.read() == (isRoot ? expected : pattern(count * 4, 99)));
        }
      }
    });
  }
}

// Part r of rank s has this many elements where parts are uneven; some have none.
size_t uneven(int part) { return part % 3 == 1 ? 0 : 100 * part + 5; }

TEST(NcclReduceScatter, flatAndUneven) {
  for (int ranks = 1; ranks <= 4; ++ranks) {
    World world(StandIn::full(), ranks);
    world.run([ranks](Rank& rank) {
      const int me = rank.comm->rank();
      for (size_t count : kSizes) {
        const std::vector<char> all =
            reduced(DType::kFloat32, ReduceOp::kSum, count * ranks, ranks);
        for (bool isFlat : {true, false}) {
          Buffer in(numbers(DType::kFloat32, count * ranks, me), rank.stream);
          std::vector<Span> parts;
          for (int part = 0; part < ranks; ++part) {
            parts.push_back(in.part(part * count * 4, count * 4));
          }
          Form form;
          form.isFlat = isFlat;
          // Into its own part: the result may take the place of the input.
          ASSERT_OK(enqueue(*rank.comm,
                            callOf(OpKind::kReduceScatter, DType::kFloat32, parts, {parts[me]}),
                            rank.stream, form));
          const std::vector<char> content = in.read();
          EXPECT(std::equal(all.begin() + me * count * 4, all.begin() + (me + 1) * count * 4,
                            content.begin() + me * count * 4));
        }
      }
      std::vector<std::unique_ptr<Buffer>> buffers;
      std::vector<Span> parts;
      for (int part = 0; part < ranks; ++part) {
        buffers.push_back(
            std::make_unique<Buffer>(numbers(DType::kInt64, uneven(part), me), rank.stream));
        parts.push_back(buffers.back()->span());
      }
      Buffer out(uneven(me) * 8, rank.stream);
      ASSERT_OK(enqueue(
          *rank.comm,
          callOf(OpKind::kReduceScatter, DType::kInt64, parts, {out.span()}, -1, ReduceOp::kMax),
          rank.stream));
      EXPECT(out.read() == reduced(DType::kInt64, ReduceOp::kMax, uneven(me), ranks));
    });
  }
}

TEST(NcclPreMulSum, hostAndDeviceFactors) {
  World world(StandIn::full(), 3);
  world.run([](Rank& rank) {
    for (bool isOnDevice : {false, true}) {
      const float factor = static_cast<float>(rank.comm->rank() + 2);
      std::vector<char> bytes(sizeof(factor));
      std::memcpy(bytes.data(), &factor, sizeof(factor));
      Buffer onDevice(bytes, rank.stream);
      PreMulSum preMulSum{isOnDevice ? onDevice.span().data : &factor, isOnDevice};
      Form form;
      form.preMulSum = &preMulSum;
      Buffer data(numbers(DType::kFloat32, 100, rank.comm->rank()), rank.stream);
      ASSERT_OK(enqueue(*rank.comm,
                        callOf(OpKind::kAllReduce, DType::kFloat32, {data.span()}, {data.span()}),
                        rank.stream, form));
      const std::vector<char> content = data.read();
      for (size_t i = 0; i < 100; ++i) {
        float expected = 0;
        for (int peer = 0; peer < 3; ++peer) {
          expected += reference::at<float>(numbers(DType::kFloat32, 100, peer).data(), i) *
                      static_cast<float>(peer + 2);
        }
        EXPECT_EQ(reference::at<float>(content.data(), i), expected);
      }
    }
    PreMulSum factor{&rank, false};
    Form form;
    form.preMulSum = &factor;
    Buffer data(numbers(DType::kInt32, 10, 0), rank.stream);
    for (DType dtype : {DType::kInt32, DType::kComplex64, DType::kFloat8E5M2, DType::kBool}) {
      const Call call = callOf(OpKind::kAllReduce, dtype, {data.span()}, {data.span()});
      EXPECT_EQ(check(rank.comm->library(), call, form).code(), Code::kUnsupported);
    }
  });
}

TEST(NcclMoves, broadcast) {
  for (int ranks = 1; ranks <= 4; ++ranks) {
    World world(StandIn::full(), ranks);
    world.run([ranks](Rank& rank) {
      for (size_t bytes : kSizes) {
        for (int root = 0; root < ranks; ++root) {
          Buffer data(pattern(bytes, rank.comm->rank()), rank.stream);
          ASSERT_OK(enqueue(*rank.comm,
                            callOf(OpKind::kBroadcast, DType::kOpaque, {}, {data.span()}, root),
                            rank.stream));
          EXPECT(data.read() == pattern(bytes, root));
        }
      }
    });
  }
}

// Lists of equal parts, flat and not, and of uneven ones; also with an NCCL that lacks the newer
// functions. `made` counts what NCCL was asked for.
void moves(StandIn& standIn, int ranks) {
  World world(standIn, ranks);
  world.run([ranks](Rank& rank) {
    const int me = rank.comm->rank();
    void* const stream = rank.stream;
    for (size_t bytes : kSizes) {
      for (bool isFlat : {true, false}) {
        Form form;
        form.isFlat = isFlat;
        auto cut = [&](const Buffer& buffer) {
          std::vector<Span> parts;
          for (int part = 0; part < ranks; ++part)
            parts.push_back(buffer.part(part * bytes, bytes));
          return parts;
        };
        auto joined = [&](auto partOf) {
          std::vector<char> all;
          for (int part = 0; part < ranks; ++part) {
            const std::vector<char> piece = partOf(part);
            all.insert(all.end(), piece.begin(), piece.end());
          }
          return all;
        };
        const auto everybody = joined([&](int part) { return pattern(bytes, part); });
        Buffer mine(pattern(bytes, me), stream);
        Buffer all(bytes * ranks, stream);
        Call call = callOf(OpKind::kAllGather, DType::kInt16, {mine.span()}, cut(all));
        ASSERT_OK(enqueue(*rank.comm, call, stream, form));
        EXPECT(all.read() == everybody);

        Buffer sent(joined([&](int part) { return pattern(bytes, me, part + 1); }), stream);
        Buffer received(bytes * ranks, stream);
        call = callOf(OpKind::kAllToAll, DType::kInt16, cut(sent), cut(received));
        ASSERT_OK(enqueue(*rank.comm, call, stream, form));
        EXPECT(received.read() == joined([&](int part) { return pattern(bytes, part, me + 1); }));

        for (int root = 0; root < ranks; ++root) {
          const bool isRoot = me == root;
          Buffer gathered(pattern(bytes * ranks, 77), stream);
          call = callOf(OpKind::kGather, DType::kInt16, {mine.span()}, {}, root);
          if (isRoot) call.out = cut(gathered);
          ASSERT_OK(enqueue(*rank.comm, call, stream, form));
          EXPECT(gathered.read() == (isRoot ? everybody : pattern(bytes * ranks, 77)));
          // In place: the root's part is there already.
          if (isRoot) call.in = {gathered.part(me * bytes, bytes)};
          ASSERT_OK(enqueue(*rank.comm, call, stream, form));
          EXPECT(gathered.read() == (isRoot ? everybody : pattern(bytes * ranks, 77)));

          Buffer scattered(bytes, stream);
          call = callOf(OpKind::kScatter, DType::kInt16, {}, {scattered.span()}, root);
          if (isRoot) call.in = cut(sent);
          ASSERT_OK(enqueue(*rank.comm, call, stream, form));
          EXPECT(scattered.read() == pattern(bytes, root, me + 1));
          if (isRoot) call.out = {call.in[me]};
          ASSERT_OK(enqueue(*rank.comm, call, stream, form));
          if (isRoot)
            EXPECT(sent.read() == joined([&](int p) { return pattern(bytes, me, p + 1); }));
        }
      }
    }
    // Uneven: from s to r go uneven(s + r) elements of 8 bytes.
    std::vector<std::unique_ptr<Buffer>> kept;
    auto keep = [&](std::vector<char> content) {
      kept.push_back(std::make_unique<Buffer>(content, stream));
      return kept.back()->span();
    };
    std::vector<Span> in, out, gathered;
    for (int peer = 0; peer < ranks; ++peer) {
      in.push_back(keep(pattern(uneven(me + peer) * 8, me, peer)));
      out.push_back(keep(pattern(uneven(me + peer) * 8, 50)));
      gathered.push_back(keep(pattern(uneven(peer) * 8, 51)));
    }
    const Span mine = keep(pattern(uneven(me) * 8, me));
    ASSERT_OK(enqueue(*rank.comm, callOf(OpKind::kAllToAll, DType::kInt64, in, out), stream));
    ASSERT_OK(
        enqueue(*rank.comm, callOf(OpKind::kAllGather, DType::kInt64, {mine}, gathered), stream));
    for (int peer = 0; peer < ranks; ++peer) {
      EXPECT(kept[3 * peer + 1]->read() == pattern(uneven(me + peer) * 8, peer, me));
      EXPECT(kept[3 * peer + 2]->read() == pattern(uneven(peer) * 8, peer));
    }
    EXPECT_OK(rank.comm->check());
  });
}

TEST(NcclMoves, listsWithEverything) {
  StandIn& standIn = StandIn::full();
  for (int ranks = 1; ranks <= 4; ++ranks) moves(standIn, ranks);
  for (const char* function : {"ncclAllGather", "ncclAlltoAll", "ncclGather", "ncclScatter"}) {
    EXPECT(standIn.count(function) > 0);
  }
}

TEST(NcclMoves, listsWithoutTheNewerFunctions) {
  StandIn& standIn = StandIn::required();
  for (int ranks = 1; ranks <= 4; ++ranks) moves(standIn, ranks);
  EXPECT(standIn.count("ncclSend") > 0);
  EXPECT_EQ(standIn.count("ncclGather"), 0);
}

TEST(NcclMoves, blockingCommunicators) {
  CommunicatorOptions options;
  options.isBlocking = true;
  World world(StandIn::full(), 3, options);
  world.run([](Rank& rank) {
    for (int round = 0; round < 20; ++round) {
      Buffer data(numbers(DType::kFloat32, 1000, rank.comm->rank()), rank.stream);
      const Call call = callOf(OpKind::kAllReduce, DType::kFloat32, {data.span()}, {data.span()});
      ASSERT_OK(enqueue(*rank.comm, call, rank.stream));
      EXPECT(data.read() == reduced(DType::kFloat32, ReduceOp::kSum, 1000, 3));
    }
  });
}

TEST(NcclMoves, pointToPointInGroups) {
  World world(StandIn::full(), 4);
  world.run([](Rank& rank) {
    const int me = rank.comm->rank();
    // A ring, and one's own: as batch_isend_irecv has them.
    Buffer out(pattern(50000, me), rank.stream), in(50000, rank.stream), own(50000, rank.stream);
    Issue issue(*rank.comm);
    ASSERT_OK(issue.group());
    EXPECT_OK(issue.group());  // once is enough
    ASSERT_OK(send(issue, out.span(), (me + 1) % 4, rank.stream));
    ASSERT_OK(receive(issue, in.span(), (me + 3) % 4, rank.stream));
    ASSERT_OK(send(issue, out.span(), me, rank.stream));
    ASSERT_OK(receive(issue, own.span(), me, rank.stream));
    ASSERT_OK(issue.end());
    ASSERT_OK(issue.end());
    EXPECT(in.read() == pattern(50000, (me + 3) % 4));
    EXPECT(own.read() == pattern(50000, me));
  });
}

TEST(NcclMoves, coalescedCollectivesAreOneLaunch) {
  World world(StandIn::full(), 2);
  StandIn& standIn = world.standIn();
  const int64_t before = standIn.count("launches");
  world.run([](Rank& rank) {
    std::vector<std::unique_ptr<Buffer>> buffers;
    Issue issue(*rank.comm);
    ASSERT_OK(issue.group());
    for (int i = 0; i < 10; ++i) {
      buffers.push_back(
          std::make_unique<Buffer>(numbers(DType::kInt32, 10 * i, rank.comm->rank()), rank.stream));
      const Span data = buffers.back()->span();
      ASSERT_OK(
          enqueue(issue, callOf(OpKind::kAllReduce, DType::kInt32, {data}, {data}), rank.stream));
    }
    // What NCCL cannot do is refused alone.
    const Span data = buffers.back()->span();
    EXPECT_EQ(enqueue(issue, callOf(OpKind::kAllReduce, DType::kInt16, {data}, {data}), rank.stream)
                  .code(),
              Code::kUnsupported);
    ASSERT_OK(issue.end());
    for (int i = 0; i < 10; ++i) {
      EXPECT(buffers[i]->read() == reduced(DType::kInt32, ReduceOp::kSum, 10 * i, 2));
    }
  });
  EXPECT_EQ(standIn.count("launches") - before, 2);
}

TEST(NcclMoves, graphsReplay) {
  World world(StandIn::full(), 2);
  world.run([](Rank& rank) {
    Buffer data(numbers(DType::kFloat32, 5000, rank.comm->rank()), rank.stream);
    const Call call = callOf(OpKind::kAllReduce, DType::kFloat32, {data.span()}, {data.span()}, -1,
                             ReduceOp::kMax);
    EXPECT(mycoll_standin_capture_begin(rank.stream) == nullptr);
    ASSERT_OK(enqueue(*rank.comm, call, rank.stream));
    void* graph = nullptr;
    EXPECT(mycoll_standin_capture_end(rank.stream, &graph) == nullptr);
    EXPECT(data.read() == numbers(DType::kFloat32, 5000, rank.comm->rank()));
    for (int round = 0; round < 3; ++round) {
      mycoll_standin_graph_launch(graph, rank.stream);
      ASSERT_OK(enqueue(*rank.comm, call, rank.stream));
    }
    EXPECT(data.read() == reduced(DType::kFloat32, ReduceOp::kMax, 5000, 2));
    mycoll_standin_graph_destroy(graph);
  });
}

TEST(NcclMoves, barrierAndRefusals) {
  World world(StandIn::full(), 3);
  world.run([](Rank& rank) {
    Buffer word(pattern(4, 0), rank.stream);
    ASSERT_OK(enqueue(*rank.comm, callOf(OpKind::kBarrier, DType::kOpaque, {}, {word.span()}),
                      rank.stream));
    EXPECT(mycoll_standin_stream_synchronize(rank.stream) == nullptr);
    const Library& library = rank.comm->library();
    EXPECT_EQ(check(library, callOf(OpKind::kMonitoredBarrier, DType::kOpaque, {}, {})).code(),
              Code::kUnsupported);
    EXPECT_EQ(check(library, callOf(OpKind::kSend, DType::kOpaque, {}, {})).code(),
              Code::kInternal);
    Form form;
    form.isFlat = true;
    Buffer parts(12, rank.stream);
    const Call gap = callOf(OpKind::kAllToAll, DType::kInt8,
                            {parts.part(0, 2), parts.part(4, 2), parts.part(8, 2)},
                            {parts.part(0, 2), parts.part(2, 2), parts.part(4, 2)});
    EXPECT_EQ(check(library, gap, form).code(), Code::kInternal);
  });
}

}  // namespace
}  // namespace mycoll::nccl::world
