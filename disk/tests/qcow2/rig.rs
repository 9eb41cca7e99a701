//! A disk over files in memory whose operations complete in an order drawn from a seed.

use disk::{
    Access, Action, Allocation, Creation, Disk, DiskOffset, EngineFailed, FileDone, FileError, FileId, FileOffset,
    FileOp, Format, Image, Io, Operation, Options, Request, Span, Status, Tail, Token, Until, qcow2,
};
use fastrand::Rng;
use memory::Segments;

/// The files; a few operations at once.
pub struct Files {
    pub bytes: Vec<Vec<u8>>,
    queue: Vec<FileOp>,
    pub random: Rng,
    /// Whether deallocation is possible.
    pub punches: bool,
    /// Writes to the file of this number fail from now on, so many of them still succeeding.
    pub failing: Option<u64>,
    /// Syncs that have ended.
    pub syncs: u64,
    /// What power loss leaves of the first file.
    pub past: Past,
}

/// What has happened to a file: what is durable, and what may be, in sectors.
#[derive(Default)]
pub struct Past {
    durable: Vec<u8>,
    /// Ended since, with their numbers; `None` is a deallocation.
    since: Vec<(u64, u64, Option<Vec<u8>>, u64)>,
    ended: u64,
    /// Operations ended when each sync was pushed.
    pushed: Vec<(u64, u64)>,
}

impl Past {
    fn apply(file: &mut Vec<u8>, at: usize, len: usize, bytes: Option<&[u8]>) {
        match bytes {
            Some(bytes) => {
                file.resize(file.len().max(at + len), 0);
                file[at..at + len].copy_from_slice(bytes);
            }
            None => {
                let end = (at + len).min(file.len());
                file[at.min(end)..end].fill(0);
            }
        }
    }

    fn synced(&mut self, id: u64) {
        let Some(place) = self.pushed.iter().position(|&(other, _)| other == id) else { return };
        let (_, covered) = self.pushed.swap_remove(place);
        let (done, left): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.since).into_iter().partition(|&(_, _, _, number)| number <= covered);
        self.since = left;
        for (at, len, bytes, _) in done {
            Past::apply(&mut self.durable, index(at), index(len), bytes.as_deref());
        }
    }

    /// A file as power loss might leave it: of each operation that is not durable all sectors, none, or some.
    pub fn after_power_loss(&self, random: &mut Rng) -> Vec<u8> {
        let mut file = self.durable.clone();
        for (at, len, bytes, _) in &self.since {
            let mode = random.u8(..3);
            for sector in 0..len / 512 {
                if mode == 0 || (mode == 1 && random.bool()) {
                    continue;
                }
                let from = index(sector * 512);
                let piece = bytes.as_ref().map(|bytes| &bytes[from..from + 512]);
                Past::apply(&mut file, index(*at) + from, 512, piece);
            }
        }
        file
    }
}

fn index(at: u64) -> usize {
    usize::try_from(at).unwrap()
}

impl Files {
    fn execute(&mut self, op: &FileOp) -> Result<(), FileError> {
        if let (Action::Write { .. }, Some(left)) = (&op.action, &mut self.failing) {
            if *left == 0 {
                return Err(FileError::Failed(5));
            }
            *left -= 1;
        }
        if op.file.0 == 0 {
            self.past.ended += 1;
            let number = self.past.ended;
            match &op.action {
                Action::Write { at, from } => {
                    self.past.since.push((at.0, from.len() as u64, Some(from.to_vec()), number));
                }
                Action::Deallocate { at, len } if self.punches => self.past.since.push((at.0, *len, None, number)),
                _ => {}
            }
        }
        let file = &mut self.bytes[usize::from(op.file.0)];
        match &op.action {
            Action::Read { at, into } => {
                let mut bytes = vec![0; into.len()];
                let at = index(at.0).min(file.len());
                let len = bytes.len().min(file.len() - at);
                bytes[..len].copy_from_slice(&file[at..at + len]);
                into.copy_from(&bytes);
            }
            Action::Write { at, from } => {
                let end = index(at.0) + from.len();
                file.resize(file.len().max(end), 0);
                file[index(at.0)..end].copy_from_slice(&from.to_vec());
            }
            Action::SyncData => {
                self.syncs += 1;
                self.past.synced(op.id.0);
            }
            Action::Deallocate { .. } if !self.punches => return Err(FileError::Unsupported),
            Action::Deallocate { at, len } => {
                let end = index(at.0 + len).min(file.len());
                file[index(at.0).min(end)..end].fill(0);
            }
        }
        Ok(())
    }
}

impl Io for Files {
    fn push(&mut self, op: FileOp) -> Result<(), FileOp> {
        if self.queue.len() == 16 {
            return Err(op);
        }
        if matches!(op.action, Action::SyncData) {
            self.past.pushed.push((op.id.0, self.past.ended));
        }
        self.queue.push(op);
        Ok(())
    }

    fn reap(&mut self, _until: Until, done: &mut Vec<FileDone>) -> Result<(), EngineFailed> {
        if !self.queue.is_empty() {
            let which = self.random.usize(..self.queue.len());
            let op = self.queue.swap_remove(which);
            let result = self.execute(&op);
            done.push(FileDone { op, result });
        }
        Ok(())
    }

    fn allocated(&mut self, _file: FileId, _at: FileOffset, len: u64) -> Allocation {
        Allocation::Data(len)
    }
}

/// A disk and what it holds.
pub struct Rig {
    pub disk: Disk<Image>,
    pub files: Files,
    /// What a reader must find.
    pub model: Vec<u8>,
    last: u64,
    answers: Vec<(u64, Status)>,
}

/// The file of a new image.
pub fn file_of(creation: &Creation) -> Vec<u8> {
    let mut bytes = vec![0; index(creation.len)];
    for write in &creation.writes {
        let end = index(write.at.0) + write.bytes.len();
        bytes.resize(bytes.len().max(end), 0);
        bytes[index(write.at.0)..end].copy_from_slice(&write.bytes);
    }
    bytes
}

/// Opens a qcow2 file for writing, and does what is to be done first.
pub fn open(bytes: &mut Vec<u8>, tail: Tail) -> Image {
    let image = qcow2::Qcow2::open(&mut bytes.as_slice(), Access::ReadWrite, tail).unwrap();
    for write in image.first_writes() {
        // The last page of a file need not be there in full.
        bytes.resize(bytes.len().max(index(write.at.0) + write.bytes.len()), 0);
        bytes[index(write.at.0)..index(write.at.0) + write.bytes.len()].copy_from_slice(&write.bytes);
    }
    Image::Qcow2(Box::new(image))
}

impl Rig {
    /// A disk of `layers`, leaf first, that holds `model`.
    pub fn new(layers: Vec<Image>, bytes: Vec<Vec<u8>>, model: Vec<u8>, seed: u64) -> Rig {
        let past = Past { durable: bytes[0].clone(), ..Past::default() };
        let files = Files {
            bytes,
            queue: Vec::new(),
            random: Rng::with_seed(seed),
            punches: true,
            failing: None,
            syncs: 0,
            past,
        };
        let disk = Disk::new(layers, Options::default()).unwrap();
        Rig { disk, files, model, last: 0, answers: Vec::new() }
    }

    fn begin(&mut self, operation: Operation, at: u64, len: u64, memory: Segments) -> u64 {
        self.last += 1;
        let request =
            Request::new(operation, Span { at: DiskOffset(at), len }, memory, Token(self.last), &self.disk.geometry())
                .unwrap();
        self.disk.submit(request, &mut self.files);
        self.last
    }

    /// Begins a write of one byte, which the model has at once.
    pub fn write(&mut self, at: u64, len: u64, byte: u8) {
        self.model[index(at)..index(at + len)].fill(byte);
        self.begin(Operation::Write { durable: false }, at, len, Segments::copy_of(&vec![byte; index(len)]));
    }

    /// Begins a write of zeroes.
    pub fn zero(&mut self, at: u64, len: u64) {
        self.model[index(at)..index(at + len)].fill(0);
        self.begin(Operation::WriteZeroes { free: true, durable: false }, at, len, Segments::empty());
    }

    /// Makes the disk larger.
    #[allow(dead_code, reason = "not every test has a disk that grows")]
    pub fn grow(&mut self, len: u64) -> Result<(), disk::ImageError> {
        self.disk.quiesce();
        let grown = self.disk.grow(len);
        self.disk.resume(&mut self.files);
        self.model.resize(if grown.is_ok() { index(len) } else { self.model.len() }, 0);
        grown
    }

    pub fn flush(&mut self) {
        self.begin(Operation::Flush, 0, 0, Segments::empty());
    }

    /// One operation of a file.
    pub fn step(&mut self) {
        let mut done = Vec::new();
        self.files.reap(Until::Now, &mut done).unwrap();
        done.into_iter().for_each(|done| self.disk.settle(done, &mut self.files));
        self.disk.retry(&mut self.files);
        while let Some((request, status)) = self.disk.answer() {
            self.answers.push((request.retire().0, status));
        }
    }

    /// Whether something is under way.
    pub fn is_busy(&self) -> bool {
        !self.disk.is_idle()
    }

    /// Until nothing is under way. Whether all has gone well.
    pub fn finish(&mut self) -> bool {
        let mut done = Vec::new();
        for _ in 0..1_000_000 {
            self.files.reap(Until::Now, &mut done).unwrap();
            for done in done.drain(..) {
                self.disk.settle(done, &mut self.files);
            }
            self.disk.retry(&mut self.files);
            while let Some((request, status)) = self.disk.answer() {
                self.answers.push((request.retire().0, status));
            }
            if self.disk.is_idle() {
                return self.answers.drain(..).all(|(_, status)| status == Status::Done);
            }
        }
        panic!("the disk does not come to rest");
    }

    /// A read of all, compared with the model.
    pub fn verify(&mut self) {
        let step = 1 << 20;
        let len = self.disk.geometry().len;
        for at in (0..len).step_by(step) {
            let size = len.min(at + step as u64) - at;
            let memory = Segments::zeroed(index(size));
            self.begin(Operation::Read, at, size, memory.clone());
            assert!(self.finish(), "the read at {at} failed");
            let found = memory.to_vec();
            let expected = &self.model[index(at)..index(at + size)];
            if let Some(wrong) = found.iter().zip(expected).position(|(found, expected)| found != expected) {
                let (found, expected) = (found[wrong], expected[wrong]);
                panic!("byte {} is {found} and should be {expected}", index(at) + wrong);
            }
        }
    }

    /// All that a reader finds.
    pub fn read_all(&mut self) -> Vec<u8> {
        let len = self.disk.geometry().len;
        let memory = Segments::zeroed(index(len));
        self.begin(Operation::Read, 0, len, memory.clone());
        assert!(self.finish(), "the read failed");
        memory.to_vec()
    }

    /// The leaf.
    pub fn leaf(&self) -> &Image {
        &self.disk.layers()[0].format
    }

    /// What the leaf has written down.
    pub fn dirty(&self) -> usize {
        self.leaf().dirty()
    }
}
