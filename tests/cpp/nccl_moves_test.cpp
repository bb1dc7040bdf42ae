// Collectives that only move data, and messages, with the stand-in NCCL.
#include "nccl_world.h"

namespace mycoll::nccl::world {
namespace {

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

// Lists of equal parts, flat and not, and lists of uneven parts.
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
          mycoll::Spans parts;
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
          // In place: the root's part is already in its buffer.
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
    // Uneven: rank s sends uneven(s + r) elements of 8 bytes to rank r.
    std::vector<std::unique_ptr<Buffer>> kept;
    auto keep = [&](std::vector<char> content) {
      kept.push_back(std::make_unique<Buffer>(content, stream));
      return kept.back()->span();
    };
    mycoll::Spans in, out, gathered;
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
  EXPECT(standIn.count("ncclAllGather") > 0);
  // Other ranks may not call it: see Enqueuer::allToAll().
  EXPECT_EQ(standIn.count("ncclAlltoAll"), 0);
}

TEST(NcclMoves, listsWithoutTheNewerFunctions) {
  StandIn& standIn = StandIn::required();
  for (int ranks = 1; ranks <= 4; ++ranks) moves(standIn, ranks);
  EXPECT(standIn.count("ncclSend") > 0);
}

TEST(NcclMoves, blockingCommunicators) {
  const CommOptions options = blocking(true);
  World world(StandIn::full(), 3, options);
  world.run([](Rank& rank) {
    for (int round = 0; round < 20; ++round) {
      Buffer data(filled(rank.comm->rank() + round), rank.stream);
      ASSERT_OK(sum(rank, data));
      EXPECT(isSumOf(data, 3 * round + 3));
    }
  });
}

TEST(NcclMoves, pointToPointInGroups) {
  World world(StandIn::full(), 4);
  world.run([](Rank& rank) {
    const int me = rank.comm->rank();
    // A ring, and messages to oneself, as batch_isend_irecv makes them.
    Buffer out(pattern(50000, me), rank.stream), in(50000, rank.stream), own(50000, rank.stream);
    Issue issue(*rank.comm);
    ASSERT_OK(issue.group());
    EXPECT_OK(issue.group());  // the second call does nothing
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
          std::make_unique<Buffer>(filled(i + rank.comm->rank(), 10 * i), rank.stream));
      const Span data = buffers.back()->span();
      ASSERT_OK(
          enqueue(issue, callOf(OpKind::kAllReduce, DType::kInt32, {data}, {data}), rank.stream));
    }
    // A call that NCCL does not support is refused, and the others are not.
    const Span data = buffers.back()->span();
    EXPECT_EQ(enqueue(issue, callOf(OpKind::kAllReduce, DType::kInt16, {data}, {data}), rank.stream)
                  .code(),
              Code::kUnsupported);
    ASSERT_OK(issue.end());
    for (int i = 0; i < 10; ++i) {
      EXPECT(isSumOf(*buffers[i], 2 * i + 1));
    }
  });
  EXPECT_EQ(standIn.count("launches") - before, 2);
}

TEST(NcclMoves, graphsReplay) {
  World world(StandIn::full(), 2);
  world.run([](Rank& rank) {
    Buffer data(filled(rank.comm->rank() + 1, 5000), rank.stream);
    EXPECT(mycoll_standin_capture_begin(rank.stream, 0) == nullptr);
    ASSERT_OK(sum(rank, data));
    void* graph = nullptr;
    EXPECT(mycoll_standin_capture_end(rank.stream, &graph) == nullptr);
    EXPECT(isSumOf(data, rank.comm->rank() + 1));  // recorded, not run
    mycoll_standin_graph_launch(graph, rank.stream);
    EXPECT(isSumOf(data, 3));
    ASSERT_OK(sum(rank, data));  // between replays
    mycoll_standin_graph_launch(graph, rank.stream);
    mycoll_standin_graph_launch(graph, rank.stream);
    EXPECT(isSumOf(data, 3 * 2 * 2 * 2));
    mycoll_standin_graph_destroy(graph);
  });
}

}  // namespace
}  // namespace mycoll::nccl::world
