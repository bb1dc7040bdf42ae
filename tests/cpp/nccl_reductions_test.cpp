// Compares reductions of the stand-in NCCL with a plain reference: types, operations, sizes, parts.
#include "nccl_world.h"
#include "reduce_reference.h"

namespace mycoll::nccl::world {
namespace {

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
          EXPECT_CONTAINS(answer, "MYCOLL_CUDA=host");
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
          mycoll::Spans outs;
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
          mycoll::Spans parts;
          for (int part = 0; part < ranks; ++part) {
            parts.push_back(in.part(part * count * 4, count * 4));
          }
          Form form;
          form.isFlat = isFlat;
          // The result may overwrite the rank's own part of the input.
          ASSERT_OK(enqueue(*rank.comm,
                            callOf(OpKind::kReduceScatter, DType::kFloat32, parts, {parts[me]}),
                            rank.stream, form));
          const std::vector<char> content = in.read();
          EXPECT(std::equal(all.begin() + me * count * 4, all.begin() + (me + 1) * count * 4,
                            content.begin() + me * count * 4));
        }
      }
      std::vector<std::unique_ptr<Buffer>> buffers;
      mycoll::Spans parts;
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

}  // namespace
}  // namespace mycoll::nccl::world
