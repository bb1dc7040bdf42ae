// What torch's worker server (torch.distributed.debug) can ask this process: POST
//   /handler/mycoll_fr_trace_json   its last operations, as `mycoll trace` reads them
// Thread contract: [any thread]; the handlers run on the server's threads, and take no lock for
// long.
#pragma once

namespace mycoll {

// Once in a process; does nothing from the second call on.
void registerControlHandlers();

}  // namespace mycoll
