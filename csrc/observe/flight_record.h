// What the black box holds, in the words of torch's flight recorder, with more under "mycoll".
//
// Thread contract: [any thread], beside others that go on recording.
#pragma once

#include "observe/black_box.h"
#include "observe/document.h"

namespace mycoll {

void writeFlightRecord(Document& document);

}  // namespace mycoll
