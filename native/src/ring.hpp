// What a device driver calls when work is over.
#pragma once

namespace wbridge {

// Adds 1 to the eventfd whose number `descriptor` is. For any thread: does not block, needs no GIL.
extern "C" void ring(void *descriptor);

}  // namespace wbridge
