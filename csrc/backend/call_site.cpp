#include "backend/call_site.h"

#include "backend/errors.h"
#include "base/env.h"

namespace mycoll {
namespace {

CallSiteHook findCallSite = nullptr;

}  // namespace

void setCallSiteHook(CallSiteHook hook) { findCallSite = hook; }

uint32_t callSiteOfWaiter() {
  if (!findCallSite || Env::process().callSites == CallSites::kNever) return 0;
  return isMainThread() ? findCallSite() : 0;
}

uint32_t callSiteOfCall() {
  static const bool isWanted = Env::process().callSites == CallSites::kAlways;
  return isWanted && findCallSite ? findCallSite() : 0;
}

}  // namespace mycoll
