// Inputs of the fuzz tests: the files in corpus/, which always run first, and inputs that are
// generated from seeds.
//
//   FUZZ_SEEDS=100000 x_test    runs many seeds
//   FUZZ_SEED=1234 x_test       runs one seed and nothing else
//   FUZZ_KEEP=FOLDER x_test     writes each input that fails to FOLDER, in the format of corpus/
#pragma once

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "test.h"

namespace test {

struct Input {
  std::string name;  // "seed 1234", or a file's
  std::string bytes;
};

inline std::vector<Input> keptInputs(const char* folder) {
  std::vector<Input> found;
  const auto corpus = std::filesystem::path(CORPUS) / folder;
  for (const auto& entry : std::filesystem::directory_iterator(corpus)) {
    std::ifstream file(entry.path(), std::ios::binary);
    found.push_back({entry.path().filename().string(),
                     {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()}});
  }
  std::sort(found.begin(), found.end(), [](auto& a, auto& b) { return a.name < b.name; });
  return found;
}

// Runs `body` with each kept input, and with the inputs that `make` generates from `few` seeds.
// Returns the number of inputs.
inline unsigned forInputs(const char* folder, unsigned few,
                          const std::function<std::string(std::mt19937& random)>& make,
                          const std::function<void(const Input& input)>& body) {
  auto run = [&](const Input& input) {
    const int before = failureCount();
    body(input);
    if (failureCount() == before) return;
    fail(folder, 0, "the input was " + input.name);
    if (const char* keep = std::getenv("FUZZ_KEEP")) {
      std::ofstream(std::filesystem::path(keep) / input.name, std::ios::binary) << input.bytes;
    }
  };
  auto runSeed = [&](unsigned seed) {
    std::mt19937 random(seed);
    run({"seed-" + std::to_string(seed), make(random)});
  };
  if (std::getenv("FUZZ_SEED")) {
    runSeed(static_cast<unsigned>(numberFrom("FUZZ_SEED", 0)));
    return 1;
  }
  const std::vector<Input> kept = keptInputs(folder);
  ASSERT(!kept.empty());
  for (const Input& input : kept) run(input);
  const auto seeds = static_cast<unsigned>(numberFrom("FUZZ_SEEDS", static_cast<int>(few)));
  for (unsigned seed = 0; seed < seeds; ++seed) runSeed(1000 + seed);
  return static_cast<unsigned>(kept.size()) + seeds;
}

}  // namespace test
