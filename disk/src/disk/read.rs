//! Reads, and the loading of metadata that tells where bytes live.
//!
//! Keeps: an operation that waits continues, or fails, when what it waits for has ended.

use memory::Segments;

use super::Disk;
use super::compressed::{Begin, Cluster, Reader, Wanted};
use super::layer::Missing;
use super::ops::Op;
use super::queue::{Parked, Ready};
use super::unaligned;
use crate::chain_map::Location;
use crate::format::{Format, Mapping, MetaBlock, Wait};
use crate::size::in_memory;
use crate::{Action, DiskOffset, FileDone, FileId, Io, Span, Status};

impl<F: Format> Disk<F> {
    /// Reads a request from `rest` on.
    pub(super) fn read<I: Io>(&mut self, number: u32, rest: Span, io: &mut I) {
        let mut at = rest.at;
        while at < rest.end() {
            let left = rest.tail_from(at);
            match self.read_first(number, left, io) {
                Ok(0) => return self.active.fail(number, Status::Failed),
                Ok(len) => at += len,
                Err(missing) => {
                    return self.park_for_chunk(Parked::Request { number, rest: left }, missing, io);
                }
            }
        }
    }

    /// Begins to read the first bytes of `span`. Returns how many; none where they cannot be read.
    fn read_first<I: Io>(&mut self, number: u32, span: Span, io: &mut I) -> Result<u64, Missing> {
        let (place, len) = self.map.resolve(span.at, &mut self.chain)?;
        let span = Span { at: span.at, len: self.map.coalesce(span.at, place, len.min(span.len), span.len) };
        match place {
            Location::Zero => self.memory(number, span).fill_zero(),
            Location::Damaged { file } => {
                self.met_damage(file, span);
                return Ok(0);
            }
            Location::Data { file, at: place } | Location::Shared { file, at: place } => {
                let into = self.memory(number, span);
                let read = Action::Read { at: place, into };
                self.push_part(number, Op::Transfer { number, ticket: None }, file, read, io);
            }
            Location::Compressed { file } => {
                let Some(cluster) = self.compressed_place(file, span)? else { return Ok(0) };
                let span = Span { at: span.at, len: cluster.len };
                let into = self.memory(number, span);
                match self.read_compressed(cluster, span, into, Reader::Request(number), io) {
                    None => {
                        self.active.part_begun(number);
                        self.active.waiting.wait_begun(number);
                    }
                    Some(Status::Done) => {}
                    Some(_) => {
                        self.met_damage(file, span);
                        return Ok(0);
                    }
                }
                return Ok(span.len);
            }
        }
        Ok(span.len)
    }

    /// The request's memory for `span`, which is a part of it.
    pub(super) fn memory(&self, number: u32, span: Span) -> Segments {
        let active = self.active.get(number);
        let request = &active.request;
        if let Some(unaligned) = request.unaligned() {
            return unaligned::memory(unaligned, request, active.edges_read, span);
        }
        request.memory().slice(in_memory(span.at - request.span().at), in_memory(span.len))
    }

    /// Where the first bytes of `span`, which the map says are in a compressed cluster of `file`, are. `None` if the
    /// format disagrees: the file was changed behind our back.
    pub(super) fn compressed_place(&mut self, file: FileId, span: Span) -> Result<Option<Cluster>, Missing> {
        match self.chain.format_of(file).map(span) {
            Ok(Mapping::Compressed { at, size, lead, skip, len }) if len > 0 => {
                Ok(Some(Cluster { file, at, size, lead, skip, len: len.min(span.len) }))
            }
            Err(Wait::Load(block)) => Err(vec![(file, block)]),
            _ => Ok(None),
        }
    }

    /// Copies the bytes at `cluster`, which are those of `span`, to `into`. Status if the cluster is cached, `None` if
    /// it is being read.
    pub(super) fn read_compressed<I: Io>(
        &mut self,
        cluster: Cluster,
        span: Span,
        into: Segments,
        reader: Reader,
        io: &mut I,
    ) -> Option<Status> {
        match self.compressed.want(cluster, span, into, reader) {
            Wanted::Cached(status) => return Some(status),
            Wanted::Joined => {}
            Wanted::Read(begin) => self.begin_compressed_read(begin, io),
        }
        None
    }

    /// Begins to read a cluster that has its memory.
    pub(super) fn begin_compressed_read<I: Io>(&mut self, begin: Begin, io: &mut I) {
        self.ops.push(Op::ReadCompressed { begin }, begin.0, self.compressed.read(begin), io);
    }

    /// A compressed cluster has been read.
    pub(super) fn compressed_read<I: Io>(&mut self, begin: Begin, done: FileDone, io: &mut I) {
        let reading = self.compressed.ended(begin);
        let (was_read, moved) = (done.result.is_ok(), reading.moved);
        let bytes = match (done.result, done.op.action) {
            (Ok(()), Action::Read { into, .. }) if !moved => self.decompress(begin.0, reading.lead, &into.to_vec()),
            _ => None,
        };
        let statuses = match bytes {
            Some(bytes) => self.compressed.serve(begin, &reading.wants, bytes),
            None => vec![Status::Failed; reading.wants.len()],
        };
        for (want, status) in reading.wants.iter().zip(statuses) {
            // It does not decompress, or to fewer bytes than the disk needs of it.
            if was_read && !moved && status == Status::Failed {
                self.met_damage(begin.0, want.span);
            }
            let number = match want.reader {
                Reader::Request(number) => number,
                Reader::Fill(fill) => self.fills.get(fill).number,
            };
            self.active.waiting.wait_ended(number);
            match want.reader {
                // What was read may be anything: it looks again where the bytes live now.
                Reader::Request(number) if moved => {
                    self.go_on_soon(Parked::Request { number, rest: want.span });
                }
                Reader::Request(number) => self.part_ended(number, status),
                // One that has moved fails: its ticket keeps all others from moving the cluster.
                Reader::Fill(fill) => self.fill_read(fill, status, io),
            }
        }
    }

    fn decompress(&mut self, file: FileId, lead: u64, bytes: &[u8]) -> Option<Vec<u8>> {
        let bytes = bytes.get(in_memory(lead)..)?;
        self.chain.format_of(file).decompress(bytes).ok()
    }

    /// Parks what needs a chunk of the map whose metadata is missing.
    pub(super) fn park_for_chunk<I: Io>(&mut self, parked: Parked, missing: Missing, io: &mut I) {
        self.set_aside_to_load(parked);
        let layers = self.layers().len();
        let begun = self.map_loader.park_for_chunk(parked, missing, layers);
        self.load(begun, io);
    }

    /// Parks something until this block is loaded.
    pub(super) fn park_for_block<I: Io>(&mut self, parked: Parked, file: FileId, block: MetaBlock, io: &mut I) {
        self.set_aside_to_load(parked);
        let begun = self.map_loader.park(parked, vec![(file, block)]);
        self.load(begun, io);
    }

    fn set_aside_to_load(&mut self, parked: Parked) {
        self.set_aside(parked);
        let number = self.request_of_parked(parked);
        self.active.waiting.wait_begun(number);
    }

    fn load<I: Io>(&mut self, blocks: Missing, io: &mut I) {
        for (file, block) in blocks {
            let into = Segments::zeroed(in_memory(block.len.into()));
            self.ops.push(Op::Load { block }, file, Action::Read { at: block.at, into }, io);
        }
    }

    /// A block of metadata was read.
    pub(super) fn loaded<I: Io>(&mut self, block: MetaBlock, done: FileDone, io: &mut I) {
        let file = done.op.file;
        self.map.cached(in_memory(block.len.into()));
        let sound = match (done.result, done.op.action) {
            (Ok(()), Action::Read { into, .. }) => self.chain.of(file).load(block, into.to_vec()),
            _ => false,
        };
        for parked in self.map_loader.loaded(file, block) {
            let number = self.request_of_parked(parked);
            self.active.waiting.wait_ended(number);
            // The block may concern another part of the chunk than the request.
            match parked {
                _ if sound || self.map.met_damage(parked.at()) => self.go_on_soon(parked),
                Parked::Request { number, .. } => self.part_ended(number, Status::Failed),
                Parked::Fill { fill, .. } => self.fill_read(fill, Status::Failed, io),
            }
            self.ready.push_back(Ready::Loaded { at: parked.at() });
        }
    }

    /// An operation that waited for metadata around byte `at` has continued.
    pub(super) fn load_ended(&mut self, at: DiskOffset) {
        self.map_loader.went_on(at, self.map.lookup(at).is_some());
    }

    /// Records that the first bytes of `span` cannot be read because `file` is damaged.
    pub(super) fn met_damage(&mut self, file: FileId, span: Span) {
        if let Ok(place) = self.chain.format_of(file).map(span) {
            self.damage.add(file, span, place);
        }
    }
}
