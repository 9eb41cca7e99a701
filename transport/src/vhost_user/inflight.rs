//! The record of requests in flight, in memory kept by the front-end: requests that a killed process had taken and not
//! answered.
//!
//! It knows nothing about guest memory or the meaning of a request. Invariants: the contents of the region are read
//! once, when a ring starts, and validated; afterwards it is only written. A request is marked there as in flight
//! before it is started, and until its answer is visible.
//!
//! Why a kill between any two stores loses nothing (vhost-user specification, "Inflight I/O tracking", split
//! virtqueues):
//! 1. Take: counter, then `inflight`. Killed before: the number of requests in flight does not include this one, so
//!    that it is taken from the available ring again.
//! 2. Answer: `next` and `last_batch_head`, then the used element. Killed here: the used index is unchanged; the whole
//!    batch is still in flight and done again.
//! 3. Publish: the used index of the ring. Killed here: it differs from `used_idx` by the size of the batch, whose
//!    heads are linked starting at `last_batch_head`: they are answered.
//! 4. Clear: `inflight` of each, then `used_idx`. Killed between: as in 3. Nothing is taken before `used_idx` is
//!    written.
//!
//! So the requests taken are always those answered plus those in flight: the available ring continues at the used index
//! plus the number in flight.
//!
//! Size: a front-end requests a region before the driver has chosen the size of its rings, and sends its own number
//! again when it reconnects (QEMU: the property `queue-size`, 128, although Linux uses a ring of 1024). So a region has
//! more room than requested, and its length alone determines the offset of each queue's record.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use memory::{GuestAddr, GuestMemory, Mapping, Region, Shared};
use rustix::fs::{FileType, MemfdFlags, SealFlags, fcntl_add_seals, fstat, ftruncate, memfd_create};
use rustix::io::Errno;

use super::kill_point;
use super::message::InflightInfo;
use super::ring::MAX_SIZE;

/// The size of the header before the descriptor states.
const HEADER_LEN: usize = 16;
/// The size of one descriptor state.
const STATE_LEN: usize = 16;
/// Records of queues are aligned to a cache line.
const ALIGN: u64 = 64;

/// Descriptors per queue of a new region, unless more are requested: the largest ring that QEMU lets a driver use.
const ROOM: u16 = 1024;

/// The features of the region, in its first eight bytes: they describe its layout (specification: "feature flags of
/// this region"). We know none. A future version that changes the layout sets one when it creates a region, and never
/// clears it: then a process that does not know the layout refuses the region without interpreting it.
const FEATURES_AT: usize = 0;
const VERSION_AT: usize = 8;
const DESC_NUM_AT: usize = 10;
const LAST_BATCH_HEAD_AT: usize = 12;
const USED_IDX_AT: usize = 14;
const VERSION: u16 = 1;

/// The first word of a state has this flag, and `next` at this bit. The bytes between are padding.
const IN_FLIGHT: u64 = 1;
const NEXT_SHIFT: u32 = 48;
const COUNTER_AT: usize = 8;

/// Why a region is not accepted.
#[derive(Debug, thiserror::Error)]
pub enum InflightRegionError {
    /// An unsupported number of queues or descriptors.
    #[error("{queues} queues of {size} descriptors do not match this disk")]
    Shape {
        /// The number of queues.
        queues: u16,
        /// Descriptors in each.
        size: u16,
    },
    /// The region is too small.
    #[error("it has {len} bytes at offset {offset} of a file of {file_len} bytes; {needed} are needed")]
    TooSmall {
        /// Its announced size.
        len: u64,
        /// Its offset in the file.
        offset: u64,
        /// The size of the file.
        file_len: u64,
        /// The size that these queues need.
        needed: u64,
    },
    /// The file is not shared memory.
    #[error("its file is not memory")]
    NotMemory,
    /// It was created by a newer version.
    #[error("its layout is unknown (features {0:#x}): it was created by a newer version of this program")]
    Layout(u64),
    /// A system call failed.
    #[error("it cannot be created or mapped")]
    Failed(#[source] std::io::Error),
}

/// Invalid contents of a region, which this program never writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    /// The version of the record is unknown.
    #[error("its version is {0}")]
    Version(u16),
    /// Created for a smaller ring, or larger than possible.
    #[error("it has {found} descriptors: the ring has {size}, and there is room for {room}")]
    Size {
        /// Descriptors in the region.
        found: u16,
        /// Slots in the ring.
        size: u16,
        /// Maximum descriptors.
        room: u16,
    },
    /// The two indices are inconsistent.
    #[error("its used index is {region}; the ring's is {ring}")]
    Index {
        /// The index in the region.
        region: u16,
        /// The index in the ring.
        ring: u16,
    },
    /// A head is not a descriptor of the ring.
    #[error("it contains the invalid descriptor {0}")]
    Head(u16),
    /// A descriptor is neither in flight nor free.
    #[error("the state of descriptor {0} is invalid")]
    State(u16),
    /// The order of two requests is ambiguous.
    #[error("two requests have the counter {0}")]
    Counter(u64),
    /// More requests than the driver has made available.
    #[error("it has {count} requests; the driver waits for {offered}")]
    TooMany {
        /// The number of requests in flight.
        count: u16,
        /// The number of requests made available and not answered.
        offered: u16,
    },
    /// The region's memory is not accessible.
    #[error("it cannot be accessed")]
    OutOfBounds,
}

/// The region of one front-end.
pub struct InflightRegion {
    memory: Arc<GuestMemory>,
    queues: u16,
    /// The number of descriptors that fit into each queue's record.
    room: u16,
    /// Its description and file, for a successor process.
    description: (InflightInfo, OwnedFd),
}

impl InflightRegion {
    /// Creates a region as a file with a sealed size; returns its description and the file.
    pub fn create(requested: &InflightInfo, queues: u16) -> Result<(InflightInfo, OwnedFd), InflightRegionError> {
        let InflightInfo { queues: count, size, .. } = *requested;
        checked_total(requested, queues)?;
        let len = total_len(count, size.max(ROOM)).ok_or(InflightRegionError::Shape { queues: count, size })?;
        let failed = |errno: Errno| InflightRegionError::Failed(errno.into());
        let file = memfd_create("inflight", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).map_err(failed)?;
        ftruncate(&file, len).map_err(failed)?;
        fcntl_add_seals(&file, SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL).map_err(failed)?;
        Ok((InflightInfo { len, offset: 0, queues: count, size }, file))
    }

    /// Maps a region sent by a front-end, new or with contents.
    pub fn of(info: &InflightInfo, file: OwnedFd, queues: u16) -> Result<InflightRegion, InflightRegionError> {
        let InflightInfo { len, offset, queues: count, size } = *info;
        let needed = checked_total(info, queues)?;
        let stat = fstat(&file).map_err(|errno| InflightRegionError::Failed(errno.into()))?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(InflightRegionError::NotMemory);
        }
        let file_len = u64::try_from(stat.st_size).unwrap_or(0);
        let is_there = offset.checked_add(len).is_some_and(|end| end <= file_len);
        if len < needed || !is_there {
            return Err(InflightRegionError::TooSmall { len, offset, file_len, needed });
        }
        let shape = || InflightRegionError::Shape { queues: count, size };
        let room = room(info).ok_or_else(shape)?;
        // A larger region is mapped only up to the size needed for the largest rings.
        let used = total_len(count, room).ok_or_else(shape)?;
        let bytes = usize::try_from(used).map_err(|_| shape())?;
        let mapping = Arc::new(Mapping::of_file(file.as_fd(), offset, bytes).map_err(InflightRegionError::Failed)?);
        let whole = Region { guest: GuestAddr(0), peer: 0, len: used, offset: 0, mapping };
        let memory = Arc::new(GuestMemory::new(vec![whole]).ok_or_else(shape)?);
        let first = memory.shared(GuestAddr(0), HEADER_LEN).and_then(|head| head.read(FEATURES_AT));
        match first.map(u64::from_le_bytes).ok_or_else(shape)? {
            0 => {}
            features => return Err(InflightRegionError::Layout(features)),
        }
        // A successor of a version without extra room uses this number for the layout.
        let description = InflightInfo { size: room, ..*info };
        Ok(InflightRegion { memory, queues: count, room, description: (description, file) })
    }

    /// The description of the region, and its file.
    pub fn description(&self) -> (&InflightInfo, &OwnedFd) {
        (&self.description.0, &self.description.1)
    }

    /// The record of one queue; `None` for a queue without one in this region.
    fn queue_record(&self, queue: u16) -> Option<Shared> {
        let len = queue_len(self.room)?;
        #[cfg(test)]
        let queue = if kill_point::is_planted(kill_point::Bug::OneRecord) { 0 } else { queue };
        let at = len.checked_mul(u64::from(queue)).filter(|_| queue < self.queues)?;
        self.memory.shared(GuestAddr(at), usize::try_from(len).ok()?)
    }

    /// Clears all requests in flight, after a reset of the device.
    pub fn clear_all(&self) {
        for queue in 0..self.queues {
            // In bounds, as checked when the region was mapped.
            self.queue_record(queue)
                .filter(|_| kill_point::is_alive())
                .and_then(|queue_record| queue_record.store_u16(VERSION_AT, 0));
        }
    }
}

/// The size of one queue's record.
fn queue_len(size: u16) -> Option<u64> {
    let states = u64::from(size).checked_mul(u64::try_from(STATE_LEN).ok()?)?;
    states.checked_add(u64::try_from(HEADER_LEN).ok()?)?.checked_next_multiple_of(ALIGN)
}

/// The size of all queues' records.
fn total_len(queues: u16, size: u16) -> Option<u64> {
    let sane = queues > 0 && (1..=MAX_SIZE).contains(&size);
    queue_len(size).filter(|_| sane)?.checked_mul(u64::from(queues))
}

/// The minimum size of a region; a disk has `queues` queues.
fn checked_total(info: &InflightInfo, queues: u16) -> Result<u64, InflightRegionError> {
    let InflightInfo { queues: count, size, .. } = *info;
    total_len(count, size).filter(|_| count <= queues).ok_or(InflightRegionError::Shape { queues: count, size })
}

/// The number of descriptors that fit into each queue's record of a region that has at least the minimum size. Its
/// length is a multiple of one record, whichever process has created it.
fn room(info: &InflightInfo) -> Option<u16> {
    let queue_record = info.len.checked_div(u64::from(info.queues))?;
    let queue_record = queue_record.checked_sub(queue_record % ALIGN)?;
    if queue_record == queue_len(info.size)? {
        return Some(info.size);
    }
    let states =
        queue_record.checked_sub(u64::try_from(HEADER_LEN).ok()?)?.checked_div(u64::try_from(STATE_LEN).ok()?)?;
    Some(u16::try_from(states).map_or(MAX_SIZE, |states| states.min(MAX_SIZE)))
}

/// The requests that an earlier process has left in the record of a queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Recovered {
    /// None: the record is new.
    Nothing,
    /// The heads of requests taken and not answered, the oldest first.
    InFlight(Vec<u16>),
}

/// The record of one queue while its ring runs.
pub struct InflightRecord {
    queue_record: Shared,
    /// The counter of the next request.
    counter: u64,
    last_batch_head: u16,
    /// Heads answered and not published yet, each with its `next`.
    batch: Vec<(u16, u16)>,
}

impl InflightRecord {
    /// Starts with the existing contents; `used` is the used index of the ring. `None` if the region has no room for
    /// this queue's ring; its contents, which belong to another ring, are then discarded.
    pub fn begin(
        region: &InflightRegion,
        queue: u16,
        size: u16,
        used: u16,
    ) -> Option<Result<(InflightRecord, Recovered), RecordError>> {
        let queue_record = region.queue_record(queue)?;
        // Checked before anything is written, so that unknown contents remain unchanged.
        let is_new = match queue_record.load_u16(VERSION_AT) {
            Some(0) => true,
            Some(VERSION) => false,
            Some(other) => return Some(Err(RecordError::Version(other))),
            None => return Some(Err(RecordError::OutOfBounds)),
        };
        if size > region.room {
            if kill_point::is_alive() {
                queue_record.store_u16(VERSION_AT, 0)?;
            }
            return None;
        }
        let mut record = InflightRecord { queue_record, counter: 0, last_batch_head: 0, batch: Vec::new() };
        let recovered = match is_new {
            true => record.initialise(region.room, used).map(|()| Recovered::Nothing).ok_or(RecordError::OutOfBounds),
            false => record.recover(region.room, size, used).map(Recovered::InFlight),
        };
        Some(recovered.map(|recovered| (record, recovered)))
    }

    /// Initializes a new region; its version is written last.
    fn initialise(&mut self, room: u16, used: u16) -> Option<()> {
        for head in 0..room {
            if self.queue_record.read::<STATE_LEN>(state_at(head))? != [0; STATE_LEN] {
                self.queue_record.write(state_at(head), [0; STATE_LEN])?;
            }
        }
        self.queue_record.store_u16(DESC_NUM_AT, room)?;
        self.queue_record.store_u16(LAST_BATCH_HEAD_AT, 0)?;
        self.queue_record.store_u16(USED_IDX_AT, used)?;
        if kill_point::is_alive() {
            self.queue_record.store_u16(VERSION_AT, VERSION)?;
        }
        Some(())
    }

    /// Completes the last batch, and lists the requests in flight.
    fn recover(&mut self, room: u16, size: u16, used: u16) -> Result<Vec<u16>, RecordError> {
        let load = |at| self.queue_record.load_u16(at).ok_or(RecordError::OutOfBounds);
        let descriptors = load(DESC_NUM_AT)?;
        if !(size..=room).contains(&descriptors) {
            return Err(RecordError::Size { found: descriptors, size, room });
        }
        let (before, newest) = (load(USED_IDX_AT)?, load(LAST_BATCH_HEAD_AT)?);
        let states: Option<Vec<DescriptorState>> = (0..descriptors).map(|head| self.state(head)).collect();
        let mut states = states.ok_or(RecordError::OutOfBounds)?;
        self.last_batch_head = newest;
        self.finish_batch(&mut states, size, before, newest, used)?;

        let mut in_flight = Vec::new();
        for (head, state) in (0..descriptors).zip(&states) {
            match state.inflight {
                0 => {}
                1 if head < size => in_flight.push((state.counter, head)),
                1 => return Err(RecordError::Head(head)),
                _ => return Err(RecordError::State(head)),
            }
        }
        in_flight.sort_unstable();
        let twice = in_flight.iter().zip(in_flight.iter().skip(1)).find(|(one, other)| one.0 == other.0);
        if let Some((&(counter, _), _)) = twice {
            return Err(RecordError::Counter(counter));
        }
        if let Some(&(last, _)) = in_flight.last() {
            self.counter = last.checked_add(1).ok_or(RecordError::Counter(last))?;
        }
        #[cfg(test)]
        if kill_point::is_planted(kill_point::Bug::Reversed) {
            in_flight.reverse();
        }
        Ok(in_flight.into_iter().map(|(_, head)| head).collect())
    }

    /// Clears requests that were published and not cleared.
    fn finish_batch(
        &self,
        states: &mut [DescriptorState],
        size: u16,
        before: u16,
        newest: u16,
        used: u16,
    ) -> Result<(), RecordError> {
        #[cfg(test)]
        if kill_point::is_planted(kill_point::Bug::BatchNotFinished) {
            return Ok(());
        }
        let count = used.wrapping_sub(before);
        if count == 0 {
            return Ok(());
        }
        if count > size {
            // If nothing is in flight, a ring has run without this record since, and there is no batch to complete.
            return match states.iter().all(|state| state.inflight == 0) {
                true => self.store_used_idx(used).ok_or(RecordError::OutOfBounds),
                false => Err(RecordError::Index { region: before, ring: used }),
            };
        }
        let mut head = newest;
        for _ in 0..count {
            let state = states.get_mut(usize::from(head)).filter(|_| head < size).ok_or(RecordError::Head(head))?;
            state.inflight = 0;
            self.clear(head, state.next).ok_or(RecordError::OutOfBounds)?;
            head = state.next;
        }
        self.store_used_idx(used).ok_or(RecordError::OutOfBounds)
    }

    fn state(&self, head: u16) -> Option<DescriptorState> {
        let bytes: [u8; STATE_LEN] = self.queue_record.read(state_at(head))?;
        let [inflight, _, _, _, _, _, low, high, counter @ ..] = bytes;
        Some(DescriptorState { inflight, next: u16::from_le_bytes([low, high]), counter: u64::from_le_bytes(counter) })
    }

    /// Records that a request was taken from the ring.
    #[inline]
    pub fn take(&mut self, head: u16) -> Option<()> {
        #[cfg(test)]
        if kill_point::is_planted(kill_point::Bug::MarkedLate) {
            return Some(());
        }
        let counter = self.counter;
        self.counter = counter.wrapping_add(1);
        let state = self.queue_record.window::<STATE_LEN, 8>(state_at(head))?;
        if kill_point::is_alive() {
            state.store_u64(COUNTER_AT, counter)?;
        }
        if kill_point::is_alive() {
            state.store_u64(0, IN_FLIGHT)?;
        }
        Some(())
    }

    /// Records that a request is answered with the next batch.
    #[inline]
    pub fn answer(&mut self, head: u16) -> Option<()> {
        let next = std::mem::replace(&mut self.last_batch_head, head);
        self.batch.push((head, next));
        if kill_point::is_alive() {
            self.store_state(head, IN_FLIGHT | u64::from(next) << NEXT_SHIFT)?;
        }
        if kill_point::is_alive() {
            self.queue_record.store_u16(LAST_BATCH_HEAD_AT, head)?;
        }
        Some(())
    }

    /// Clears the batch, after the used index `used` was published. `free` is called for each head.
    pub fn published(&mut self, used: u16, mut free: impl FnMut(u16)) -> Option<()> {
        for &(head, next) in &self.batch {
            self.clear(head, next)?;
            free(head);
        }
        self.batch.clear();
        self.store_used_idx(used)
    }

    #[inline]
    fn clear(&self, head: u16, next: u16) -> Option<()> {
        if kill_point::is_alive() {
            self.store_state(head, u64::from(next) << NEXT_SHIFT)?;
        }
        Some(())
    }

    fn store_used_idx(&self, used: u16) -> Option<()> {
        #[cfg(test)]
        if kill_point::is_planted(kill_point::Bug::UsedIndexLost) {
            return Some(());
        }
        if kill_point::is_alive() {
            self.queue_record.store_u16(USED_IDX_AT, used)?;
        }
        Some(())
    }

    fn store_state(&self, head: u16, word: u64) -> Option<()> {
        self.queue_record.window::<STATE_LEN, 8>(state_at(head))?.store_u64(0, word)
    }

    /// Clears the batch before it is published: a bug that the model must detect.
    #[cfg(test)]
    pub fn clear_early(&self) {
        for &(head, next) in &self.batch {
            self.clear(head, next);
        }
    }
}

/// The state of one descriptor, as read from the record.
struct DescriptorState {
    inflight: u8,
    next: u16,
    counter: u64,
}

fn state_at(head: u16) -> usize {
    HEADER_LEN + STATE_LEN * usize::from(head)
}
