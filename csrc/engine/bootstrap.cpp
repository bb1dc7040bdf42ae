#include "engine/bootstrap.h"

#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <fstream>
#include <iterator>
#include <thread>
#include <vector>

#include "base/env.h"
#include "base/sha256.h"
#include "base/topology.h"

namespace mycoll {
namespace {

using Clock = std::chrono::steady_clock;

// What a rank leaves in the store.
struct Card {
  int ranks = 0;
  std::string secret;  // hexadecimal
  PeerAddress address;

  std::string encode() const {
    return "mycoll1\n" + std::to_string(ranks) + "\n" + secret + "\n" + address.encode();
  }
  static Status decode(const std::string& text, Card* card) {
    size_t line[3] = {std::string::npos, 0, 0};
    for (size_t i = 0, from = 0; i < 3; ++i, from = line[i - 1] + 1) {
      line[i] = text.find('\n', from);
      if (line[i] == std::string::npos) {
        return Status(Code::kStore, "the store holds something that mycoll did not write");
      }
    }
    card->ranks = atoi(text.substr(line[0] + 1, line[1] - line[0] - 1).c_str());
    card->secret = text.substr(line[1] + 1, line[2] - line[1] - 1);
    return PeerAddress::decode(text.substr(line[2] + 1), &card->address);
  }
};

// A second process with our rank, or what an earlier job has left behind.
Status checkEarlier(const GroupOptions& options, Store& store, const PeerAddress& self,
                    int64_t generation) {
  bool found = false;
  std::string text;
  MYCOLL_RETURN_IF_ERROR(store.tryGet(
      std::to_string(generation - 1) + "/" + std::to_string(options.rank), &found, &text));
  if (!found) return Status();
  Card card;
  MYCOLL_RETURN_IF_ERROR(Card::decode(text, &card));
  const PeerAddress& other = card.address;
  if (other.hostName == self.hostName && other.pid == self.pid &&
      other.startTicks == self.startTicks) {
    return Status();  // this process, making the group anew
  }
  const std::string who = "rank " + std::to_string(options.rank) + " of group '" + options.name +
                          "' was joined before by " + other.describe();
  if (other.hostName == self.hostName && processStartTicks(other.pid) != other.startTicks) {
    return Status(Code::kStore,
                  who + ", a process that is gone: the store is left over from an earlier job. "
                        "Use a new file or port, or remove the file.");
  }
  return Status(Code::kStore, who + ". Two processes were started with one rank, or the store is "
                                    "left over from an earlier job.");
}

Status readSecretFile(std::string* secret) {
  Env env;
  MYCOLL_RETURN_IF_ERROR(Env::load(&env));
  if (env.secretFile.empty()) return Status();
  std::ifstream file(env.secretFile, std::ios::binary);
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (text.size() < 16) {
    return Status(Code::kInvalidArgument, "MYCOLL_SECRET_FILE: '" + env.secretFile +
                                              "' cannot be read, or is shorter than 16 bytes");
  }
  *secret = text;
  return Status();
}

std::string listNumbers(const std::vector<int>& numbers) {
  std::string text;
  for (int number : numbers) text += (text.empty() ? "" : ", ") + std::to_string(number);
  return text;
}

}  // namespace

Status meet(const GroupOptions& options, Store& store, const PeerAddress& self,
            GroupAddress* result) {
  const Deadline deadline = Deadline::after(options.timeout);
  const std::string rankText = std::to_string(options.rank);
  int64_t generation = 0;
  MYCOLL_RETURN_IF_ERROR(store.add("join/" + rankText, 1, &generation));
  if (generation > 1) MYCOLL_RETURN_IF_ERROR(checkEarlier(options, store, self, generation));

  Card mine;
  mine.ranks = options.ranks;
  mine.address = self;
  unsigned char random[32];
  MYCOLL_RETURN_IF_ERROR(randomBytes(random, sizeof(random)));
  mine.secret = toHex(random, sizeof(random));
  const std::string prefix = std::to_string(generation) + "/";
  MYCOLL_RETURN_IF_ERROR(store.set(prefix + rankText, mine.encode()));
  if (generation > 2) store.remove(std::to_string(generation - 2) + "/" + rankText);

  std::vector<Card> cards(options.ranks);
  std::vector<int> missing;
  for (int rank = 0; rank < options.ranks; ++rank) {
    if (rank != options.rank) missing.push_back(rank);
  }
  cards[options.rank] = mine;
  auto pause = std::chrono::microseconds(200);
  auto lastCheck = Clock::now();
  while (!missing.empty()) {
    std::vector<int> still;
    for (int rank : missing) {
      bool found = false;
      std::string text;
      MYCOLL_RETURN_IF_ERROR(store.tryGet(prefix + std::to_string(rank), &found, &text));
      if (!found) {
        still.push_back(rank);
        continue;
      }
      MYCOLL_RETURN_IF_ERROR(Card::decode(text, &cards[rank]));
      if (cards[rank].ranks != options.ranks) {
        return Status(Code::kStore,
                      "group '" + options.name + "': rank " + rankText + " was started with " +
                          std::to_string(options.ranks) + " ranks, rank " + std::to_string(rank) +
                          " (" + cards[rank].address.describe() + ") with " +
                          std::to_string(cards[rank].ranks) + ": the world sizes must be equal");
      }
    }
    const bool progressed = still.size() < missing.size();
    missing.swap(still);
    if (missing.empty()) break;
    if (deadline.expired()) {
      return Status(Code::kTimeout,
                    "group '" + options.name + "': rank " + rankText + " waited " +
                        std::to_string(options.timeout.count()) + " ms for ranks " +
                        listNumbers(missing) + " of " + std::to_string(options.ranks) +
                        ", which have not come. Were they started, with the same world size and "
                        "the same store?");
    }
    if (options.interrupted && Clock::now() - lastCheck > std::chrono::milliseconds(50)) {
      lastCheck = Clock::now();
      if (options.interrupted()) return Status(Code::kInterrupted, "interrupted by a signal");
    }
    // Asking costs the store something: ask less often when nobody comes.
    pause = progressed ? std::chrono::microseconds(200)
                       : std::min(pause * 2, std::chrono::microseconds(20'000));
    std::this_thread::sleep_for(pause);
  }

  std::string secret = cards[0].secret;
  std::string fileSecret;
  MYCOLL_RETURN_IF_ERROR(readSecretFile(&fileSecret));
  Digest digest = fileSecret.empty() ? sha256(secret) : hmacSha256(fileSecret, secret);
  result->secret.assign(reinterpret_cast<const char*>(digest.data()), digest.size());
  // Everybody may know the group's number; it does not give the secret away.
  digest = hmacSha256(result->secret, "mycoll context " + options.name);
  std::memcpy(&result->context, digest.data(), sizeof(result->context));
  result->name = options.name;
  result->rank = options.rank;
  result->peers.clear();
  for (Card& card : cards) result->peers.push_back(std::move(card.address));
  return Status();
}

}  // namespace mycoll
