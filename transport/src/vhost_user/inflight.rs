//! The record of requests in flight that a front-end keeps for us: what a killed process had taken and not answered.
//!
//! Knows nothing about guest memory or what a request asks for. Invariants: what lies in the region is read once, when
//! a ring starts, and judged; afterwards it is only written. A request is in flight there from before it is begun until
//! after its answer can be seen.
//!
//! Why a kill at any store is survived (vhost-user specification, "Inflight I/O tracking", split virtqueues):
//! 1. Taken: counter, then `inflight`. Killed before: the number of requests in flight does not count it, so that it
//!    is taken from the available ring again.
//! 2. Answered: `next` and `last_batch_head`, then the used element. Killed here: the used index has not moved, all of
//!    the batch is still in flight and done again.
//! 3. Published: the used index of the ring. Killed here: it differs from `used_idx` by the size of the batch, whose
//!    heads hang together from `last_batch_head` on: they are answered.
//! 4. Cleared: `inflight` of each, then `used_idx`. Killed between: as in 3. Nothing is taken before `used_idx` is
//!    written.
//!
//! So the requests taken are always those answered and those in flight: the used index plus their number is where the
//! available ring goes on.
//!
//! How large it is: a front-end asks before the driver has chosen the size of its rings, and says its own number again
//! when it comes back (QEMU: the property `queue-size`, 128, where Linux makes a ring of 1024). So a region has more
//! room than was asked for, and its length alone says where each queue's record lies.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use memory::{GuestAddr, GuestMemory, Mapping, Region, Shared};
use rustix::fs::{FileType, MemfdFlags, SealFlags, fcntl_add_seals, fstat, ftruncate, memfd_create};
use rustix::io::Errno;

use super::message::InflightInfo;
use super::moment;
use super::ring::MAX_SIZE;

/// Bytes before the states of descriptors, and bytes of one state.
const HEADER_LEN: usize = 16;
const STATE_LEN: usize = 16;
/// Regions of queues begin at a multiple of this, a line of the cache.
const ALIGN: u64 = 64;

/// Descriptors in each queue of a region, if no more are asked for: the largest ring that QEMU lets a driver make.
const ROOM: u16 = 1024;

/// The features of the region, in its first eight bytes: what says of all of it how it is laid out (specification:
/// "feature flags of this region"). We know none. Whoever changes what lies where sets one when the region is made, and
/// never takes it away: then a process that does not know it refuses the region as it stands, wherever it believes the
/// second queue's record to be.
const FEATURES_AT: usize = 0;
const VERSION_AT: usize = 8;
const DESC_NUM_AT: usize = 10;
const LAST_BATCH_HEAD_AT: usize = 12;
const USED_IDX_AT: usize = 14;
const VERSION: u16 = 1;

/// In the first word of a state: the flag, and where `next` begins. The bytes between are padding.
const IN_FLIGHT: u64 = 1;
const NEXT_SHIFT: u32 = 48;
const COUNTER_AT: usize = 8;

/// Why a region is not taken.
#[derive(Debug, thiserror::Error)]
pub enum BadRegion {
    /// Another number of queues, or of descriptors, than there can be.
    #[error("{queues} queues of {size} descriptors are not what this disk has")]
    Shape {
        /// Queues.
        queues: u16,
        /// Descriptors in each.
        size: u16,
    },
    /// Not as large as it must be.
    #[error("it has {len} bytes at {offset}, in a file of {file_len}, and needs {needed}")]
    TooSmall {
        /// What is said to be its size.
        len: u64,
        /// Where it begins.
        offset: u64,
        /// The size of its file.
        file_len: u64,
        /// What these queues need.
        needed: u64,
    },
    /// Not memory that is shared.
    #[error("its file is not memory")]
    NotMemory,
    /// It is of a process that knows more.
    #[error("it is laid out in a way that this program does not know (features {0:#x}): a newer one has made it")]
    Layout(u64),
    /// The kernel refused.
    #[error("it cannot be made or mapped")]
    Failed(#[source] std::io::Error),
}

/// What a region says that no process of ours has written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Damaged {
    /// Another layout.
    #[error("its version is {0}")]
    Version(u16),
    /// Made for a smaller ring, or larger than it can be.
    #[error("it has {found} descriptors: the ring has {size}, and there is room for {room}")]
    Size {
        /// Descriptors in the region.
        found: u16,
        /// Places in the ring.
        size: u16,
        /// Descriptors that it can have.
        room: u16,
    },
    /// The two indices have nothing to do with each other.
    #[error("its used index is {region}, and the ring's is {ring}")]
    Index {
        /// In the region.
        region: u16,
        /// In the ring.
        ring: u16,
    },
    /// A head that is none.
    #[error("it names descriptor {0}")]
    Head(u16),
    /// Neither in flight nor not.
    #[error("the state of descriptor {0} is none")]
    State(u16),
    /// An order that is none.
    #[error("two requests have the counter {0}")]
    Counter(u64),
    /// More requests than the driver has offered.
    #[error("it has {count} requests, and the driver waits for {offered}")]
    TooMany {
        /// Requests in flight.
        count: u16,
        /// Requests offered and not answered.
        offered: u16,
    },
    /// It is not where it was.
    #[error("it cannot be accessed")]
    Unreachable,
}

/// The region of one front-end.
pub struct InflightRegion {
    memory: Arc<GuestMemory>,
    queues: u16,
    /// Descriptors that there is room for in each.
    room: u16,
    /// What it is, and its file: for the process that takes the place of this one.
    told: (InflightInfo, OwnedFd),
}

impl InflightRegion {
    /// A new region, as a file that can be neither grown nor shrunk, and what there is to say of it.
    pub fn create(asked: &InflightInfo, queues: u16) -> Result<(InflightInfo, OwnedFd), BadRegion> {
        let InflightInfo { queues: count, size, .. } = *asked;
        checked_total(asked, queues)?;
        let len = total_len(count, size.max(ROOM)).ok_or(BadRegion::Shape { queues: count, size })?;
        let failed = |errno: Errno| BadRegion::Failed(errno.into());
        let file = memfd_create("inflight", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).map_err(failed)?;
        ftruncate(&file, len).map_err(failed)?;
        fcntl_add_seals(&file, SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL).map_err(failed)?;
        Ok((InflightInfo { len, offset: 0, queues: count, size }, file))
    }

    /// Takes over a region that a front-end has kept, or just been given.
    pub fn of(info: &InflightInfo, file: OwnedFd, queues: u16) -> Result<InflightRegion, BadRegion> {
        let InflightInfo { len, offset, queues: count, size } = *info;
        let needed = checked_total(info, queues)?;
        let stat = fstat(&file).map_err(|errno| BadRegion::Failed(errno.into()))?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(BadRegion::NotMemory);
        }
        let file_len = u64::try_from(stat.st_size).unwrap_or(0);
        let is_there = offset.checked_add(len).is_some_and(|end| end <= file_len);
        if len < needed || !is_there {
            return Err(BadRegion::TooSmall { len, offset, file_len, needed });
        }
        let shape = || BadRegion::Shape { queues: count, size };
        let room = room(info).ok_or_else(shape)?;
        // No more than the largest rings need is mapped, however large it is said to be.
        let used = total_len(count, room).ok_or_else(shape)?;
        let bytes = usize::try_from(used).map_err(|_| shape())?;
        let mapping = Arc::new(Mapping::of_file(file.as_fd(), offset, bytes).map_err(BadRegion::Failed)?);
        let whole = Region { guest: GuestAddr(0), peer: 0, len: used, offset: 0, mapping };
        let memory = Arc::new(GuestMemory::new(vec![whole]).ok_or_else(shape)?);
        let first = memory.shared(GuestAddr(0), HEADER_LEN).and_then(|head| head.read(FEATURES_AT));
        match first.map(u64::from_le_bytes).ok_or_else(shape)? {
            0 => {}
            features => return Err(BadRegion::Layout(features)),
        }
        // A process from before there was room to spare takes this number for the layout.
        let told = InflightInfo { size: room, ..*info };
        Ok(InflightRegion { memory, queues: count, room, told: (told, file) })
    }

    /// What the region is, and its file.
    pub fn told(&self) -> (&InflightInfo, &OwnedFd) {
        (&self.told.0, &self.told.1)
    }

    /// The record of one queue; `None` for a queue that the region has no room for.
    fn piece(&self, queue: u16) -> Option<Shared> {
        let len = queue_len(self.room)?;
        #[cfg(test)]
        let queue = if moment::is_planted(moment::Bug::OneRecord) { 0 } else { queue };
        let at = len.checked_mul(u64::from(queue)).filter(|_| queue < self.queues)?;
        self.memory.shared(GuestAddr(at), usize::try_from(len).ok()?)
    }

    /// Has nothing in flight any more: the device was reset.
    pub fn forget(&self) {
        for queue in 0..self.queues {
            // In bounds, as checked when it was mapped.
            self.piece(queue).filter(|_| moment::lives()).and_then(|piece| piece.store_u16(VERSION_AT, 0));
        }
    }
}

/// Bytes for one queue.
fn queue_len(size: u16) -> Option<u64> {
    let states = u64::from(size).checked_mul(u64::try_from(STATE_LEN).ok()?)?;
    states.checked_add(u64::try_from(HEADER_LEN).ok()?)?.checked_next_multiple_of(ALIGN)
}

/// Bytes for all queues.
fn total_len(queues: u16, size: u16) -> Option<u64> {
    let sane = queues > 0 && (1..=MAX_SIZE).contains(&size);
    queue_len(size).filter(|_| sane)?.checked_mul(u64::from(queues))
}

/// The bytes that a region must have at least; a disk has `queues` queues.
fn checked_total(info: &InflightInfo, queues: u16) -> Result<u64, BadRegion> {
    let InflightInfo { queues: count, size, .. } = *info;
    total_len(count, size).filter(|_| count <= queues).ok_or(BadRegion::Shape { queues: count, size })
}

/// Descriptors that each queue of a region has room for, which is at least as long as it must be. Its length is a
/// number of equal pieces, whoever has made it.
fn room(info: &InflightInfo) -> Option<u16> {
    let piece = info.len.checked_div(u64::from(info.queues))?;
    let piece = piece.checked_sub(piece % ALIGN)?;
    if piece == queue_len(info.size)? {
        return Some(info.size);
    }
    let states = piece.checked_sub(u64::try_from(HEADER_LEN).ok()?)?.checked_div(u64::try_from(STATE_LEN).ok()?)?;
    Some(u16::try_from(states).map_or(MAX_SIZE, |states| states.min(MAX_SIZE)))
}

/// What a process before this one has left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Left {
    /// Nothing: the region is new.
    Nothing,
    /// These were taken and not answered, the oldest first.
    InFlight(Vec<u16>),
}

/// The record of one queue while its ring runs.
pub struct Record {
    piece: Shared,
    /// Of the next request.
    counter: u64,
    last_batch_head: u16,
    /// Heads answered and not published yet, each with its `next`.
    batch: Vec<(u16, u16)>,
}

impl Record {
    /// Begins with what is there; `used` is the index of the ring. `None`: the region has no room for this queue, and
    /// what it says is of another ring.
    pub fn begin(region: &InflightRegion, queue: u16, size: u16, used: u16) -> Option<Result<(Record, Left), Damaged>> {
        let piece = region.piece(queue)?;
        // Before anything is written: what is not known stays as it is.
        let is_new = match piece.load_u16(VERSION_AT) {
            Some(0) => true,
            Some(VERSION) => false,
            Some(other) => return Some(Err(Damaged::Version(other))),
            None => return Some(Err(Damaged::Unreachable)),
        };
        if size > region.room {
            if moment::lives() {
                piece.store_u16(VERSION_AT, 0)?;
            }
            return None;
        }
        let mut record = Record { piece, counter: 0, last_batch_head: 0, batch: Vec::new() };
        let left = match is_new {
            true => record.initialise(region.room, used).map(|()| Left::Nothing).ok_or(Damaged::Unreachable),
            false => record.recover(region.room, size, used).map(Left::InFlight),
        };
        Some(left.map(|left| (record, left)))
    }

    /// Makes a new region ready; its version comes last.
    fn initialise(&mut self, room: u16, used: u16) -> Option<()> {
        for head in 0..room {
            if self.piece.read::<STATE_LEN>(state_at(head))? != [0; STATE_LEN] {
                self.piece.write(state_at(head), [0; STATE_LEN])?;
            }
        }
        self.piece.store_u16(DESC_NUM_AT, room)?;
        self.piece.store_u16(LAST_BATCH_HEAD_AT, 0)?;
        self.piece.store_u16(USED_IDX_AT, used)?;
        if moment::lives() {
            self.piece.store_u16(VERSION_AT, VERSION)?;
        }
        Some(())
    }

    /// Finishes the last batch, and lists what is in flight.
    fn recover(&mut self, room: u16, size: u16, used: u16) -> Result<Vec<u16>, Damaged> {
        let load = |at| self.piece.load_u16(at).ok_or(Damaged::Unreachable);
        let descriptors = load(DESC_NUM_AT)?;
        if !(size..=room).contains(&descriptors) {
            return Err(Damaged::Size { found: descriptors, size, room });
        }
        let (before, newest) = (load(USED_IDX_AT)?, load(LAST_BATCH_HEAD_AT)?);
        let states: Option<Vec<State>> = (0..descriptors).map(|head| self.state(head)).collect();
        let mut states = states.ok_or(Damaged::Unreachable)?;
        self.last_batch_head = newest;
        self.finish_batch(&mut states, size, before, newest, used)?;

        let mut in_flight = Vec::new();
        for (head, state) in (0..descriptors).zip(&states) {
            match state.inflight {
                0 => {}
                1 if head < size => in_flight.push((state.counter, head)),
                1 => return Err(Damaged::Head(head)),
                _ => return Err(Damaged::State(head)),
            }
        }
        in_flight.sort_unstable();
        let twice = in_flight.iter().zip(in_flight.iter().skip(1)).find(|(one, other)| one.0 == other.0);
        if let Some((&(counter, _), _)) = twice {
            return Err(Damaged::Counter(counter));
        }
        if let Some(&(last, _)) = in_flight.last() {
            self.counter = last.checked_add(1).ok_or(Damaged::Counter(last))?;
        }
        #[cfg(test)]
        if moment::is_planted(moment::Bug::Reversed) {
            in_flight.reverse();
        }
        Ok(in_flight.into_iter().map(|(_, head)| head).collect())
    }

    /// What was published and not cleared is not in flight any more.
    fn finish_batch(
        &self,
        states: &mut [State],
        size: u16,
        before: u16,
        newest: u16,
        used: u16,
    ) -> Result<(), Damaged> {
        #[cfg(test)]
        if moment::is_planted(moment::Bug::BatchNotFinished) {
            return Ok(());
        }
        let count = used.wrapping_sub(before);
        if count == 0 {
            return Ok(());
        }
        if count > size {
            // Of a ring that ran without this record, if nothing is in flight: then there is nothing to finish.
            return match states.iter().all(|state| state.inflight == 0) {
                true => self.show_used(used).ok_or(Damaged::Unreachable),
                false => Err(Damaged::Index { region: before, ring: used }),
            };
        }
        let mut head = newest;
        for _ in 0..count {
            let state = states.get_mut(usize::from(head)).filter(|_| head < size).ok_or(Damaged::Head(head))?;
            state.inflight = 0;
            self.clear(head, state.next).ok_or(Damaged::Unreachable)?;
            head = state.next;
        }
        self.show_used(used).ok_or(Damaged::Unreachable)
    }

    fn state(&self, head: u16) -> Option<State> {
        let bytes: [u8; STATE_LEN] = self.piece.read(state_at(head))?;
        let [inflight, _, _, _, _, _, low, high, counter @ ..] = bytes;
        Some(State { inflight, next: u16::from_le_bytes([low, high]), counter: u64::from_le_bytes(counter) })
    }

    /// A request was taken from the ring.
    #[inline]
    pub fn take(&mut self, head: u16) -> Option<()> {
        #[cfg(test)]
        if moment::is_planted(moment::Bug::MarkedLate) {
            return Some(());
        }
        let counter = self.counter;
        self.counter = counter.wrapping_add(1);
        let state = self.piece.window::<STATE_LEN, 8>(state_at(head))?;
        if moment::lives() {
            state.store_u64(COUNTER_AT, counter)?;
        }
        if moment::lives() {
            state.store_u64(0, IN_FLIGHT)?;
        }
        Some(())
    }

    /// A request is to be answered with the next batch.
    #[inline]
    pub fn answer(&mut self, head: u16) -> Option<()> {
        let next = std::mem::replace(&mut self.last_batch_head, head);
        self.batch.push((head, next));
        if moment::lives() {
            self.store_state(head, IN_FLIGHT | u64::from(next) << NEXT_SHIFT)?;
        }
        if moment::lives() {
            self.piece.store_u16(LAST_BATCH_HEAD_AT, head)?;
        }
        Some(())
    }

    /// The used index `used` can be seen: nothing of the batch is in flight any more. Each head is told to `free`.
    pub fn published(&mut self, used: u16, mut free: impl FnMut(u16)) -> Option<()> {
        for &(head, next) in &self.batch {
            self.clear(head, next)?;
            free(head);
        }
        self.batch.clear();
        self.show_used(used)
    }

    #[inline]
    fn clear(&self, head: u16, next: u16) -> Option<()> {
        if moment::lives() {
            self.store_state(head, u64::from(next) << NEXT_SHIFT)?;
        }
        Some(())
    }

    fn show_used(&self, used: u16) -> Option<()> {
        #[cfg(test)]
        if moment::is_planted(moment::Bug::UsedIndexLost) {
            return Some(());
        }
        if moment::lives() {
            self.piece.store_u16(USED_IDX_AT, used)?;
        }
        Some(())
    }

    fn store_state(&self, head: u16, word: u64) -> Option<()> {
        self.piece.window::<STATE_LEN, 8>(state_at(head))?.store_u64(0, word)
    }

    /// For a bug that the model must find.
    #[cfg(test)]
    pub fn clear_early(&self) {
        for &(head, next) in &self.batch {
            self.clear(head, next);
        }
    }
}

/// One state as it was read.
struct State {
    inflight: u8,
    next: u16,
    counter: u64,
}

fn state_at(head: u16) -> usize {
    HEADER_LEN.saturating_add(STATE_LEN.saturating_mul(usize::from(head)))
}
