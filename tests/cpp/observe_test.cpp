#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <fstream>
#include <iterator>
#include <thread>
#include <vector>

#include "observe/document.h"
#include "observe/recorder.h"
#include "observe/trace_file.h"
#include "test.h"

using namespace mycoll;

namespace {

Operation allReduce(uint64_t sequence, uint64_t bytes = 4) {
  Operation operation;
  operation.kind = OpKind::kAllReduce;
  operation.dtype = DType::kFloat32;
  operation.reduceOp = ReduceOp::kSum;
  operation.elementBytes = 4;
  operation.inBytes = operation.outBytes = bytes;
  operation.sequence = sequence;
  return operation;
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != text.npos;
}

size_t count(const std::string& text, const std::string& part) {
  size_t found = 0;
  for (size_t at = text.find(part); at != text.npos; at = text.find(part, at + 1)) ++found;
  return found;
}

}  // namespace

TEST(Recorder, remembersTheLatest) {
  GroupRecord group({"remembers", 77, 0, 2, {}});
  const uint64_t total = BlackBox::process().capacity() + 10;
  for (uint64_t i = 0; i < total; ++i) {
    const OpRecord record = group.enqueue(allReduce(i), 1000);
    record.start(1001);
    group.setSubmitted(i + 1);
    if (i + 1 < total) record.finish(true, 1002);
  }
  const std::string text = TraceFile::contents(true);
  EXPECT(contains(text, "\"collective_seq_id\":10,"));
  EXPECT(!contains(text, "\"collective_seq_id\":9,"));
  EXPECT(contains(text, "\"collective_seq_id\":" + std::to_string(total - 1) + ","));
  EXPECT_EQ(count(text, "\"state\":\"started\""), size_t{1});
  EXPECT(contains(text, "\"last_completed_collective\":" + std::to_string(total - 2)));
}

TEST(Recorder, aLateEndLeavesOthersAlone) {
  OpRecord late;
  {
    GroupRecord group({"late", 78, 0, 2, {}});
    late = group.enqueue(allReduce(0), 1000);
    for (uint32_t i = 1; i <= 2 * BlackBox::process().capacity(); ++i) {
      (void)group.enqueue(allReduce(i), 1000);
    }
    late.finish(true, 2000);  // its entry is another's by now
    EXPECT(!contains(TraceFile::contents(true), "\"state\":\"completed\""));
  }
  GroupRecord next({"next", 79, 0, 2, {}});  // in the same memory
  late.finish(false, 3000);
  (void)next.enqueue(allReduce(0), 1000);
  const std::string text = TraceFile::contents(true);
  EXPECT(!contains(text, "\"name\":\"late\""));
  EXPECT(contains(text, "\"name\":\"next\""));
  EXPECT(!contains(text, "\"failed\":true"));
}

TEST(Recorder, whatIsUnderWayIsKept) {
  GroupRecord group({"kept", 85, 0, 2, {}});
  const OpRecord stuck = group.enqueue(allReduce(0), 1000, /*isStarted=*/true);
  for (uint32_t i = 1; i <= 3 * BlackBox::process().capacity(); ++i) {
    group.enqueue(allReduce(i), 1000).finish(true, 2000);
  }
  EXPECT_EQ(count(TraceFile::contents(true), "\"state\":\"started\""), size_t{1});
  stuck.finish(true, 3000);
  EXPECT(!contains(TraceFile::contents(true), "\"state\":\"started\""));
}

TEST(Recorder, countsWhatIsNotRememberedAndWhatGroupsThatAreGoneDid) {
  const Tally& ended = BlackBox::process().ended(OpKind::kAllReduce);
  const uint64_t before = get(ended.done), bytesBefore = get(ended.bytes);
  const uint32_t total = 4 * BlackBox::process().capacity();
  std::vector<OpRecord> records;
  {
    GroupRecord group({"counts", 86, 0, 2, {}});
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
  GroupRecord old({"closed", 87, 0, 2, {}});
  old.close();
  GroupRecord next({"its successor", 88, 0, 2, {}});  // in the same memory
  old.enqueue(allReduce(0), 1000).finish(false, 2000);
  old.setSubmitted(7);
  const std::string text = TraceFile::contents(true);
  EXPECT(contains(text, "its successor"));
  EXPECT(!contains(text, "all_reduce"));
  EXPECT(contains(text, "\"submitted\":0"));
}

TEST(Recorder, aJobIsWhatBeginsAlone) {
  EXPECT(BlackBox::process().rank() >= 0);
  auto world = std::make_unique<GroupRecord>(GroupIdentity{"world", 0xA1, 2, 4, {}});
  EXPECT_EQ(BlackBox::process().job(), toContext(0xA1));
  EXPECT_EQ(BlackBox::process().rank(), 2);
  GroupRecord part({"part", 0xA2, 1, 2, {0, 3}});
  EXPECT_EQ(BlackBox::process().job(), toContext(0xA1));
  EXPECT_EQ(BlackBox::process().rank(), 2);
  part.close();
  world->close();
  GroupRecord again({"world", 0xA3, 0, 2, {}});
  EXPECT_EQ(BlackBox::process().job(), toContext(0xA3));
  EXPECT_EQ(BlackBox::process().rank(), 0);
}

TEST(Recorder, textsAreCutBetweenCharacters) {
  GroupRecord group({"cut", 89, 0, 2, {}});
  std::string letters;
  for (int i = 0; i < 80; ++i) letters += "\u6570";
  group.describe("a" + letters);
  const std::string shown = "\"desc\":\"a" + letters.substr(0, 3 * 42) + "\"";
  EXPECT(contains(TraceFile::contents(true), shown));
  const uint32_t site =
      BlackBox::process().intern("step", "/" + letters + letters + "/train.py", 57);
  const BlackBox::Place place = BlackBox::process().placeOf(site);
  EXPECT_EQ(place.function, "step");
  EXPECT_EQ(place.line, 57);
  EXPECT(place.file.size() < 255 && place.file.size() > 200);
  EXPECT_EQ(place.file.substr(0, 3), "\u6570");
  EXPECT(contains(place.file, "\u6570/train.py"));
}

TEST(Recorder, oldGroupsAreNotBlamedForNewOnes) {
  auto old = std::make_unique<GroupRecord>(GroupIdentity{"old", 80, 0, 2, {}});
  old->close();
  GroupRecord fresh({"fresh", 81, 0, 2, {}});
  old->fail(Status(Code::kTimeout, "too late"));
  EXPECT(!contains(TraceFile::contents(true), "too late"));
}

// Others read while operations are recorded: what they see is whole.
TEST(Recorder, readersSeeWholeEntries) {
  GroupRecord group({"whole", 82, 0, 2, {}});
  std::atomic<bool> isOver{false};
  std::thread writer([&] {
    for (uint64_t i = 0; !isOver.load(); ++i) {
      const OpRecord record = group.enqueue(allReduce(i, i * 4), static_cast<int64_t>(1000 + i));
      record.finish(true, static_cast<int64_t>(2000 + i));
    }
  });
  for (int round = 0; round < 20; ++round) {
    const std::string text = TraceFile::contents(true);
    for (size_t at = text.find("\"collective_seq_id\":"); at != text.npos;
         at = text.find("\"collective_seq_id\":", at + 1)) {
      const std::string sequence = std::to_string(std::atoll(text.c_str() + at + 20));
      const size_t sizes = text.find("\"input_sizes\":[[", at);
      EXPECT_EQ(std::to_string(std::atoll(text.c_str() + sizes + 16)), sequence);
    }
  }
  isOver.store(true);
  writer.join();
}

TEST(Recorder, aChildHasABoxOfItsOwn) {
  GroupRecord group({"parent", 83, 0, 2, {}});
  (void)group.enqueue(allReduce(0), 1000);
  const pid_t child = fork();
  if (child == 0) _exit(contains(TraceFile::contents(true), "parent") ? 1 : 0);
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
}

TEST(TraceFile, isWrittenWholeAndPrivate) {
  char folder[] = "/tmp/mycoll_test_XXXXXX";
  ASSERT(mkdtemp(folder) != nullptr);
  const std::string path = std::string(folder) + "/rank_0.json";
  GroupRecord group({"file", 84, 1, 3, {4, 5, 6}});
  group.describe("tensor parallel");
  std::string written;
  ASSERT_OK(TraceFile::write(path, &written));
  EXPECT_EQ(written, path);
  std::ifstream file(path);
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  EXPECT(contains(text, "\"desc\":\"tensor parallel\",\"ranks\":\"[4, 5, 6]\""));
  EXPECT(!TraceFile::write("/nowhere/at/all", &written).ok());
  unlink(path.c_str());
  rmdir(folder);
}

// Whoever reads meanwhile sees one of them, whole.
TEST(TraceFile, manyMayWriteAtOnce) {
  char folder[] = "/tmp/mycoll_test_XXXXXX";
  ASSERT(mkdtemp(folder) != nullptr);
  const std::string path = std::string(folder) + "/rank_0.json";
  GroupRecord group({"written at once", 90, 0, 2, {}});
  std::atomic<int> failures{0};
  std::vector<std::thread> writers;
  for (int i = 0; i < 4; ++i) {
    writers.emplace_back([&] {
      std::string written;
      for (int round = 0; round < 50; ++round) {
        if (!TraceFile::write(path, &written).ok()) failures.fetch_add(1);
        std::ifstream file(path);
        const std::string text((std::istreambuf_iterator<char>(file)),
                               std::istreambuf_iterator<char>());
        if (text.size() < 2 || text.substr(text.size() - 2) != "}\n") failures.fetch_add(1);
      }
    });
  }
  for (std::thread& writer : writers) writer.join();
  EXPECT_EQ(failures.load(), 0);
  unlink(path.c_str());
  EXPECT_EQ(rmdir(folder), 0);  // nothing else was left there
}

TEST(Document, picklesAsPythonDoes) {
  auto pickle = Document::pickle();
  pickle->beginMap();
  pickle->key("a").integer(-2);
  pickle->key("b").beginList();
  pickle->null();
  pickle->boolean(true);
  pickle->real(1.0);
  pickle->end();
  pickle->end();
  const std::string expected(
      "\x80\x02}(X\x01\0\0\0a\x8a\x08\xfe\xff\xff\xff\xff\xff\xff\xffX\x01\0\0\0b](N\x88G\x3f\xf0"
      "\0\0\0\0\0\0eu.",
      42);
  EXPECT(pickle->finish() == expected);
}

TEST(Document, escapesJson) {
  auto json = Document::json();
  json->beginMap();
  json->key("text").text("a\"b\\c\nd");
  json->key("list").beginList();
  json->integer(1);
  json->beginMap();
  json->end();
  json->end();
  json->end();
  EXPECT_EQ(json->finish(), std::string("{\"text\":\"a\\\"b\\\\c\\u000ad\",\"list\":[1,{}]}\n"));
}
