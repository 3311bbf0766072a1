"""Array bytes to disk and back: threads, direct I/O, a memory budget, and checksums in the same pass."""
