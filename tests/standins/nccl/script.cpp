#include "script.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <sstream>
#include <thread>

#include "standin_nccl.h"

namespace standin::nccl {
namespace {

struct Globals {
  std::mutex mutex;
  std::string text;
  Script script;
  std::map<std::string, int64_t> counts;
};

Script parse(const std::string& text) {
  Script script;
  std::istringstream list(text);
  for (std::string entry; std::getline(list, entry, ',');) {
    const size_t equals = entry.find('=');
    const std::string key = entry.substr(0, equals);
    const std::string value = equals == std::string::npos ? "" : entry.substr(equals + 1);
    if (key == "version") {
      script.version = std::stoi(value);
    } else if (key == "progress_ms") {
      script.progressMilliseconds = std::stoi(value);
    } else if (key == "rank") {
      script.rank = std::stoi(value);
    } else if (key == "hang") {
      script.hang = value;
    } else if (key == "fail") {
      script.fail = value;
    } else if (key == "error_after") {
      script.errorAfter = std::stoll(value);
    } else if (key == "error") {
      script.error = static_cast<mycoll::nccl::Result>(std::stoi(value));
    } else if (key == "mismatch") {
      script.mismatchIsError = value == "error";
    } else if (key == "duplicate_gpu") {
      script.duplicateGpu = value == "1";
    } else if (key == "window") {
      script.hasWindows = value != "none";
    } else if (key == "init_syncs") {
      script.initSyncs = value != "0";
    } else if (key == "one_thread") {
      script.oneThread = value != "0";
    } else if (key == "connect") {
      script.connectsLazily = value != "eagerly";
    } else if (key == "peer_death") {
      script.peerDeathIsError = value != "hang";
    } else {
      die("STANDIN_NCCL does not know '" + entry + "'");
    }
  }
  return script;
}

std::string fromEnvironment() {
  const char* text = std::getenv("STANDIN_NCCL");
  return text != nullptr ? text : "";
}

// Never destroyed: hanging threads read it until the process ends.
Globals& globals() {
  static Globals& all = *[] {
    auto* made = new Globals;
    made->text = fromEnvironment();
    made->script = parse(made->text);
    return made;
  }();
  return all;
}

bool lists(const std::string& list, const char* what) {
  std::istringstream words(list);
  for (std::string word; std::getline(words, word, '+');) {
    if (word == what) return true;
  }
  return false;
}

}  // namespace

bool Script::hangs(const char* what, int ofRank) const {
  return concerns(ofRank) && lists(hang, what);
}

bool Script::fails(const char* what, int ofRank) const {
  return concerns(ofRank) && lists(fail, what);
}

Script script() {
  std::lock_guard<std::mutex> lock(globals().mutex);
  return globals().script;
}

void nap() { std::this_thread::sleep_for(std::chrono::milliseconds(1)); }

void count(const std::string& what, int64_t change) {
  std::lock_guard<std::mutex> lock(globals().mutex);
  globals().counts[what] += change;
}

int64_t counted(const std::string& what) {
  std::lock_guard<std::mutex> lock(globals().mutex);
  return globals().counts[what];
}

void die(const std::string& sentence) {
  std::fprintf(stderr, "stand-in NCCL: %s\n", sentence.c_str());
  std::fflush(stderr);
  std::abort();
}

}  // namespace standin::nccl

extern "C" void mycoll_standin_nccl_script(const char* text) {
  using namespace standin::nccl;
  const std::string next = text != nullptr ? text : fromEnvironment();
  const Script parsed = parse(next);
  std::lock_guard<std::mutex> lock(globals().mutex);
  globals().script = parsed;
}

extern "C" int64_t mycoll_standin_nccl_count(const char* what) {
  return standin::nccl::counted(what);
}
