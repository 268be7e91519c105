// The inner loops of strided copies.
#pragma once

#include "table.hpp"

namespace wbridge {

// Does `piece`, whose loops are given, from `from` to `to`. `stream`: long runs go past the caches.
void copy_piece(const Piece &piece, const Loop *loops, std::size_t num_loops, char *to, const char *from,
                bool stream);

// Whether a transpose of elements of this many bytes is done in tiles.
bool is_tile_element(std::int64_t nbytes);

// Makes what was written past the caches visible to whoever sees a later write of this thread.
void finish_streaming();

}  // namespace wbridge
