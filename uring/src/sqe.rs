//! Builds the submission queue entry for a step of an operation.
//!
//! Invariant: an entry has RWF_NOWAIT, so that the kernel answers EAGAIN where it would otherwise have one of its own
//! workers do the transfer; but a read does not if the kernel waits for its pages by itself, without a worker.

use io_uring::types::Fixed;
use io_uring::{opcode, squeue};
use memory::Part;

use crate::flight::IoStep;
use crate::flight_slab::{FlightSlab, Slot};
use crate::registered_buffers::RegisteredBuffers;

/// A single READ or WRITE has a 32-bit length, and moves less than 2 GiB anyway; the rest follows in later steps.
const LEN_MAX: usize = 1 << 30;

/// The entry for the step of `slot`, if it is a transfer. Parts in `registered` memory need no page lookup.
pub(crate) fn build(flights: &FlightSlab, slot: Slot, registered: &RegisteredBuffers) -> Option<squeue::Entry> {
    let (file, step) = flights.step(slot);
    let file = Fixed(u32::from(file.0));
    let entry = match step {
        IoStep::Read { at, parts: [part], waits } => match registered.index_of(part) {
            Some(index) => opcode::ReadFixed::new(file, part.base(), len(part), index)
                .offset(at)
                .rw_flags(read_flags(waits))
                .build(),
            None => opcode::Read::new(file, part.base(), len(part)).offset(at).rw_flags(read_flags(waits)).build(),
        },
        IoStep::Write { at, parts: [part] } => match registered.index_of(part) {
            Some(index) => opcode::WriteFixed::new(file, part.base(), len(part), index)
                .offset(at)
                .rw_flags(libc::RWF_NOWAIT)
                .build(),
            None => opcode::Write::new(file, part.base(), len(part)).offset(at).rw_flags(libc::RWF_NOWAIT).build(),
        },
        IoStep::Read { at, parts, waits } => {
            opcode::Readv::new(file, parts.as_ptr().cast(), count(parts)).offset(at).rw_flags(read_flags(waits)).build()
        }
        IoStep::Write { at, parts } => {
            opcode::Writev::new(file, parts.as_ptr().cast(), count(parts)).offset(at).rw_flags(libc::RWF_NOWAIT).build()
        }
        IoStep::WriteCached { .. } | IoStep::SyncData | IoStep::Deallocate { .. } => return None,
    };
    Some(entry.user_data(u64::from(slot)))
}

fn read_flags(waits: bool) -> i32 {
    if waits { 0 } else { libc::RWF_NOWAIT }
}

fn len(part: &Part) -> u32 {
    u32::try_from(part.len().min(LEN_MAX)).unwrap_or(u32::MAX)
}

fn count(parts: &[Part]) -> u32 {
    u32::try_from(parts.len()).unwrap_or(u32::MAX)
}
