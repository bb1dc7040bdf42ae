#include "transport/copy_trials.h"

#include "base/log.h"

namespace mycoll {

using Choice = SingleCopy::Choice;

Choice CopyTrials::begin(size_t bytes, bool* isTimed) {
  const SingleCopy::Case size = SingleCopy::caseOf(OpKind::kSend, 2, bytes);
  Trial& trial = trials_[size];
  SingleCopy::Chosen& chosen = trial.chosen;
  if (chosen.way == Choice::kUnknown) chosen.way = SingleCopy::process().choice(size);
  if (chosen.way != Choice::kUnknown && !chosen.isDueAgain()) return chosen.way;
  if (round_.unfinished == 0) {
    const bool isDirect = trial.direct.size() < trial.staged.size();
    round_ = {size, isDirect ? Choice::kDirect : Choice::kStaged};
  }
  if (round_.of == size && round_.messages < kMostMessages) {
    *isTimed = true;
    ++round_.messages;
    ++round_.unfinished;
    round_.bytes += bytes;
  }
  return round_.way;
}

void CopyTrials::end(Choice way, bool isOk) {
  round_.isSpoiled |= !isOk || way != round_.way;
  if (--round_.unfinished > 0 || round_.isSpoiled) return;
  Trial& trial = trials_[round_.of];
  const std::chrono::duration<float, std::micro> took = Clock::now() - round_.began;
  const auto size = static_cast<float>(size_t{1} << round_.of.logBytes);
  (way == Choice::kDirect ? trial.direct : trial.staged)
      .push_back(took.count() * size / static_cast<float>(round_.bytes));
  if (trial.direct.size() <= SingleCopy::kRounds) return;
  const SingleCopy::Measured result =
      SingleCopy::judge(trial.staged.data() + 1, trial.direct.data() + 1);
  MYCOLL_LOG_DEBUG("messages of %.0f bytes: staged %.1f us, single copy %.1f us", size,
                   result.stagedMicros, result.directMicros);
  trial = {{.way = result.choice, .nextAgain = kAgain}, {}, {}};
  SingleCopy::process().keep(round_.of, result);
}

}  // namespace mycoll
