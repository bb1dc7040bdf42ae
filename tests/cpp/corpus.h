// Inputs of the fuzz tests: kept ones, which are files in corpus/ and always run first, and seeds.
//
//   FUZZ_SEEDS=100000 x_test    many seeds
//   FUZZ_SEED=1234 x_test       one of them again, and nothing else
//   FUZZ_KEEP=FOLDER x_test     writes the input of each seed that fails there, fit for corpus/
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

// Runs `body` with each kept input, and with what `make` makes of so many seeds. Returns how many.
inline unsigned forInputs(const char* folder, unsigned few,
                          const std::function<std::string(std::mt19937& random)>& make,
                          const std::function<void(const Input& input)>& body) {
  auto number = [](const char* text) {
    return static_cast<unsigned>(std::strtoul(text, nullptr, 10));
  };
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
  if (const char* one = std::getenv("FUZZ_SEED")) {
    runSeed(number(one));
    return 1;
  }
  const std::vector<Input> kept = keptInputs(folder);
  ASSERT(!kept.empty());
  for (const Input& input : kept) run(input);
  const char* many = std::getenv("FUZZ_SEEDS");
  const unsigned seeds = many ? number(many) : few;
  for (unsigned seed = 0; seed < seeds; ++seed) runSeed(1000 + seed);
  return static_cast<unsigned>(kept.size()) + seeds;
}

}  // namespace test
