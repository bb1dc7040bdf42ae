#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <fstream>
#include <iterator>
#include <thread>
#include <vector>

#include "observe/recorder.h"
#include "observe/trace_file.h"
#include "test.h"

using namespace mycoll;

namespace {

Operation allReduce(uint64_t sequence, uint64_t bytes = 4) {
  Operation operation;
  operation.signature = {OpKind::kAllReduce, DType::kFloat32, 0, ReduceOp::kSum, -1, bytes, 0};
  operation.inBytes = operation.outBytes = bytes;
  operation.sequence = sequence;
  return operation;
}

// One operation as a reader of the black box finds it.
struct Row {
  uint64_t id, sequence, bytes;
  OpState state;
};
struct Area {
  std::string name, description, failure;
  GroupPhase phase;
  uint64_t submitted, finished;
  std::vector<Row> rows;  // oldest first

  size_t count(OpState state) const {
    return static_cast<size_t>(std::count_if(rows.begin(), rows.end(),
                                             [&](const Row& row) { return row.state == state; }));
  }
};

// A number of the JSON description at the beginning of the box.
size_t described(const std::string& box, const std::string& name, const std::string& what) {
  const size_t part = box.find("\"" + name + "\":{\"at\":");
  const size_t at = box.find("\"" + what + "\":", part);
  return static_cast<size_t>(std::atoll(box.c_str() + at + what.size() + 3));
}

template <typename T>
T at(const std::string& box, size_t offset) {
  T value;
  std::memcpy(static_cast<void*>(&value), box.data() + offset, sizeof(T));
  return value;
}

#define FIELD(box, base, Type, field) \
  at<decltype(Type::field)::value_type>(box, (base) + offsetof(Type, field))

std::vector<Area> areasOf(const std::string& box) {
  std::vector<Area> areas;
  const size_t bytes = described(box, "groups", "bytes");
  for (size_t base = described(box, "groups", "at"); base < box.size(); base += bytes) {
    Area area{box.c_str() + base + offsetof(GroupState, name),
              box.c_str() + base + offsetof(GroupState, description),
              box.c_str() + base + offsetof(GroupState, failure),
              static_cast<GroupPhase>(FIELD(box, base, GroupState, phase)),
              FIELD(box, base, GroupState, submitted),
              FIELD(box, base, GroupState, finished),
              {}};
    const size_t first = base + described(box, "entries", "at");
    for (uint32_t i = 0; i < BlackBox::process().capacity(); ++i) {
      const size_t entry = first + i * sizeof(Entry);
      const Row row{FIELD(box, entry, Entry, id), FIELD(box, entry, Entry, sequence),
                    FIELD(box, entry, Entry, inBytes),
                    static_cast<OpState>(FIELD(box, entry, Entry, state))};
      if (row.id) area.rows.push_back(row);
    }
    std::sort(area.rows.begin(), area.rows.end(),
              [](const Row& a, const Row& b) { return a.id < b.id; });
    areas.push_back(std::move(area));
  }
  return areas;
}

// Returns the latest group of this name that is not closed, or an area without a name.
Area areaOf(const std::string& name) {
  Area found{};
  for (Area& area : areasOf(BlackBox::process().snapshot())) {
    if (area.name == name && area.phase != GroupPhase::kClosed) found = std::move(area);
  }
  return found;
}

}  // namespace

TEST(Recorder, remembersTheLatest) {
  GroupRecord group("remembers", 77, 0, 2, {});
  const uint64_t total = BlackBox::process().capacity() + 10;
  for (uint64_t i = 0; i < total; ++i) {
    const OpRecord record = group.enqueue(allReduce(i), 1000);
    record.start(1001);
    group.setSubmitted(i + 1);
    if (i + 1 < total) record.finish(true, 1002);
  }
  const Area area = areaOf("remembers");
  EXPECT_EQ(area.rows.front().sequence, uint64_t{10});
  EXPECT_EQ(area.rows.back().sequence, total - 1);
  EXPECT_EQ(area.count(OpState::kStarted), size_t{1});
  EXPECT_EQ(area.finished, total - 1);
}

TEST(Recorder, aLateEndLeavesOthersAlone) {
  OpRecord late;
  {
    GroupRecord group("late", 78, 0, 2, {});
    late = group.enqueue(allReduce(0), 1000);
    for (uint32_t i = 1; i <= 2 * BlackBox::process().capacity(); ++i) {
      (void)group.enqueue(allReduce(i), 1000);
    }
    late.finish(true, 2000);  // its entry has been reused
    EXPECT_EQ(areaOf("late").count(OpState::kDone), size_t{0});
  }
  GroupRecord next("next", 79, 0, 2, {});  // in the same memory
  late.finish(false, 3000);
  (void)next.enqueue(allReduce(0), 1000);
  EXPECT_EQ(areaOf("late").name, "");
  EXPECT_EQ(areaOf("next").rows.size(), size_t{1});
  EXPECT_EQ(areaOf("next").count(OpState::kFailed), size_t{0});
}

TEST(Recorder, pendingOperationsAreKept) {
  GroupRecord group("kept", 85, 0, 2, {});
  const OpRecord stuck = group.enqueue(allReduce(0), 1000, /*isStarted=*/true);
  for (uint32_t i = 1; i <= 3 * BlackBox::process().capacity(); ++i) {
    group.enqueue(allReduce(i), 1000).finish(true, 2000);
  }
  EXPECT_EQ(areaOf("kept").count(OpState::kStarted), size_t{1});
  stuck.finish(true, 3000);
  EXPECT_EQ(areaOf("kept").count(OpState::kStarted), size_t{0});
}

TEST(Recorder, countsForgottenCallsAndThoseOfClosedGroups) {
  const Tally& ended = BlackBox::process().ended(OpKind::kAllReduce);
  const uint64_t before = get(ended.done), bytesBefore = get(ended.bytes);
  const uint32_t total = 4 * BlackBox::process().capacity();
  std::vector<OpRecord> records;
  {
    GroupRecord group("counts", 86, 0, 2, {});
    for (uint32_t i = 0; i < total; ++i) records.push_back(group.enqueue(allReduce(i, 8), 1000));
    for (uint32_t i = 1; i < total; ++i) records[i].finish(true, 2000);
    EXPECT_EQ(get(ended.done), before);
  }
  EXPECT_EQ(get(ended.done), before + total - 1);
  records[0].finish(true, 2000);  // late
  EXPECT_EQ(get(ended.done), before + total);
  EXPECT_EQ(get(ended.bytes), bytesBefore + 8 * total);
}

TEST(Recorder, aClosedGroupWritesNothing) {
  GroupRecord old("closed", 87, 0, 2, {});
  old.close();
  GroupRecord next("its successor", 88, 0, 2, {});  // in the same memory
  old.enqueue(allReduce(0), 1000).finish(false, 2000);
  old.setSubmitted(7);
  const Area area = areaOf("its successor");
  EXPECT_EQ(area.name, "its successor");
  EXPECT(area.rows.empty());
  EXPECT_EQ(area.submitted, uint64_t{0});
}

TEST(Recorder, theFirstOfConcurrentGroupsIsTheJob) {
  GroupRecord({"before", 0xA0, 1, 2, {}}).close();
  EXPECT(BlackBox::process().rank() >= 0);
  auto world = std::make_unique<GroupRecord>("world", 0xA1, 2, 4, std::vector<int64_t>());
  EXPECT_EQ(BlackBox::process().job(), toContext(0xA1));
  EXPECT_EQ(BlackBox::process().rank(), 2);
  GroupRecord part("part", 0xA2, 1, 2, {0, 3});
  EXPECT_EQ(BlackBox::process().job(), toContext(0xA1));
  EXPECT_EQ(BlackBox::process().rank(), 2);
  part.close();
  world->close();
  GroupRecord again("world", 0xA3, 0, 2, {});
  EXPECT_EQ(BlackBox::process().job(), toContext(0xA3));
  EXPECT_EQ(BlackBox::process().rank(), 0);
}

TEST(Recorder, textsAreCutBetweenCharacters) {
  GroupRecord group("cut", 89, 0, 2, {});
  std::string letters;
  for (int i = 0; i < 80; ++i) letters += "\u6570";
  group.describe("a" + letters);
  EXPECT_EQ(areaOf("cut").description, "a" + letters.substr(0, 3 * 42));
  const uint32_t site =
      BlackBox::process().intern("step", "/" + letters + letters + "/train.py", 57);
  EXPECT_EQ(BlackBox::process().placeOf(site), "train.py:57 in step");
  // As readers of the box see it.
  const std::string box = BlackBox::process().snapshot();
  const size_t end = box.find("\u6570/train.py\n57");
  const size_t begin = box.rfind("step\n", end);
  EXPECT(end != box.npos && begin != box.npos);
  const std::string file = box.substr(begin + 5, end + 12 - begin - 5);
  EXPECT(file.size() < 255 && file.size() > 200);
  EXPECT_EQ(file.substr(0, 3), "\u6570");
  EXPECT_CONTAINS(file, "\u6570/train.py");
}

TEST(Recorder, oldGroupsAreNotBlamedForNewOnes) {
  auto old = std::make_unique<GroupRecord>("old", 80, 0, 2, std::vector<int64_t>());
  old->close();
  GroupRecord fresh("fresh", 81, 0, 2, {});
  old->fail(Status(Code::kTimeout, "too late"));
  EXPECT_EQ(areaOf("fresh").failure, "");
}

// Readers see whole entries while operations are recorded.
TEST(Recorder, readersSeeWholeEntries) {
  GroupRecord group("whole", 82, 0, 2, {});
  std::atomic<bool> isOver{false};
  std::thread writer([&] {
    for (uint64_t i = 0; !isOver.load(); ++i) {
      const OpRecord record = group.enqueue(allReduce(i, i * 4), static_cast<int64_t>(1000 + i));
      record.finish(true, static_cast<int64_t>(2000 + i));
    }
  });
  for (int round = 0; round < 20; ++round) {
    for (const Row& row : areaOf("whole").rows) EXPECT_EQ(row.bytes, row.sequence * 4);
  }
  isOver.store(true);
  writer.join();
}

TEST(Recorder, aChildHasABoxOfItsOwn) {
  GroupRecord group("parent", 83, 0, 2, {});
  (void)group.enqueue(allReduce(0), 1000);
  test::endProcess(test::startProcess([] { EXPECT_EQ(areaOf("parent").name, ""); }));
}

// Several threads write a trace file at the same time. Readers always see one whole file.
TEST(TraceFile, manyMayWriteAtOnce) {
  const test::ScopedFolder folder;
  const std::string path = folder.path() + "/rank_0";
  GroupRecord group("written at once", 90, 0, 2, {});
  group.describe("tensor parallel");
  const size_t whole = BlackBox::process().snapshot().size();
  std::atomic<int> failures{0};
  std::vector<std::thread> writers;
  for (int i = 0; i < 4; ++i) {
    writers.emplace_back([&] {
      std::string written;
      for (int round = 0; round < 20; ++round) {
        if (!TraceFile::write(path, &written).ok()) failures.fetch_add(1);
        std::ifstream file(path);
        const std::string box((std::istreambuf_iterator<char>(file)),
                              std::istreambuf_iterator<char>());
        if (written != path || box.size() != whole) failures.fetch_add(1);
        const std::vector<Area> areas = areasOf(box);
        if (std::none_of(areas.begin(), areas.end(),
                         [](const Area& area) { return area.description == "tensor parallel"; })) {
          failures.fetch_add(1);
        }
      }
    });
  }
  for (std::thread& writer : writers) writer.join();
  EXPECT_EQ(failures.load(), 0);
  std::string written;
  EXPECT(!TraceFile::write("/nowhere/at/all", &written).ok());
  unlink(path.c_str());
  EXPECT(std::filesystem::is_empty(folder.path()));  // no temporary file is left
}
