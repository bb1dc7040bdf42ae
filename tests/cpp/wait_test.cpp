// How a rank waits: how it counts cores, and how it detects that other threads need them.
#include "base/wait.h"

#include <chrono>

#include "test.h"

using namespace mycoll;
using test::ScopedEnv;
using test::ScopedFolder;

TEST(Wait, countsCores) {
  EXPECT(usableCores() >= 1);
  const ScopedFolder v2;
  v2.write("cpu.max", "max 100000\n");
  v2.write("job/cpu.max", "350000 100000\n");
  v2.write("job/step/cpu.max", "max 100000\n");
  EXPECT_EQ(detail::cgroupCores("0::/job/step\n", v2.path()), 3);
  EXPECT_EQ(detail::cgroupCores("0::/\n", v2.path()), 0);
  EXPECT_EQ(detail::cgroupCores("0::/unseen/from/here\n", v2.path()), 0);
  v2.write("job/step/cpu.max", "50000 100000\n");
  EXPECT_EQ(detail::cgroupCores("0::/job/step\n", v2.path()), 1);

  const ScopedFolder v1;
  v1.write("cpu,cpuacct/cpu.cfs_quota_us", "200000\n");
  v1.write("cpu,cpuacct/cpu.cfs_period_us", "100000\n");
  v1.write("cpu,cpuacct/job/cpu.cfs_quota_us", "-1\n");
  v1.write("cpu,cpuacct/job/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(detail::cgroupCores("5:cpuset:/x\n4:cpu,cpuacct:/job\n0::/\n", v1.path()), 2);
  EXPECT_EQ(detail::cgroupCores("garbage\n", v1.path()), 0);
}

TEST(Wait, choosesByCores) {
  const SpinPolicy crowded = detail::choosePolicy(5, 4, -1);
  EXPECT_EQ(crowded.pauses, 20);
  EXPECT_EQ(crowded.spinMicros, 0);
  EXPECT_EQ(crowded.yieldMicros, 2000);
  EXPECT_EQ(crowded.longYields, 4);
  const SpinPolicy roomy = detail::choosePolicy(4, 4, -1);
  EXPECT_EQ(roomy.spinMicros, 30);
  EXPECT_EQ(roomy.yieldMicros, 1000);
  EXPECT_EQ(detail::choosePolicy(4, 4, 0).spinMicros, 0);
  EXPECT_EQ(detail::choosePolicy(9, 4, 77).spinMicros, 77);
  ScopedEnv spin("MYCOLL_SPIN_US", "123");
  EXPECT_EQ(choose(1).spinMicros, 123);
  cpuRelax();
}

TEST(Wait, longYieldsShowCoreContention) {
  using std::chrono::milliseconds;
  const auto at = [](int time) { return CoreContention::Clock::time_point(milliseconds(time)); };
  CoreContention one(1);
  EXPECT(!one.isHere(at(1000)));
  one.yielded(at(1000), at(1001));
  EXPECT(!one.isHere(at(1001)));
  one.yielded(at(1001), at(1004));
  EXPECT(one.isHere(at(1004)));
  EXPECT(one.isHere(at(1203)));
  EXPECT(!one.isHere(at(1204)));

  CoreContention three(3);
  for (const int begin : {1000, 1010, 1100, 1110}) {  // twice two long yields in a row
    three.yielded(at(begin), at(begin + 3));
    EXPECT(!three.isHere(at(begin + 3)));
  }
  three.yielded(at(1120), at(1123));
  EXPECT(three.isHere(at(1123)));
  EXPECT(!three.isHere(at(1323)));
  three.yielded(at(1325), at(1328));  // one more shows that the contention continues
  EXPECT(three.isHere(at(1328)));
  three.yielded(at(2000), at(2003));
  EXPECT(!three.isHere(at(2003)));
}
