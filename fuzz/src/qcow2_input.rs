//! What a fuzzer is given to say about a qcow2 image: a file, and requests to the disk in it.
//!
//! Knows nothing of what either means, but for where a mutation is likely to matter. Every input says something, and
//! the zeros of a file take no space in it:
//!
//! - a byte, of which the lower five bits are the number of requests;
//! - the requests, of five bytes each: operation, place (two bytes), number of sectors, fill;
//! - the length of the file in sectors (two bytes);
//! - sectors of the file to the end of the input: number (two bytes), length without the zeros at its end (two bytes),
//!   bytes. A number may be there twice: the last one counts.

use disk::FileOffset;
use fastrand::Rng;

use super::storage::{SECTOR, Sparse};

/// Requests in an input, at most.
const REQUESTS_MAX: usize = 31;
/// Where the fields of the header begin, and what is behind them: the first extension.
const FIELDS: [usize; 22] = [4, 8, 16, 20, 24, 28, 32, 36, 40, 48, 56, 60, 64, 72, 80, 88, 96, 100, 104, 112, 116, 120];
/// Bits of table entries with a meaning of their own: copied, compressed, zero; and the lowest of a number of sectors.
const MARKS: [u64; 4] = [1 << 63, 1 << 62, 1, 1 << 54];

/// Operation, place (two bytes), number of sectors, fill.
pub type Asked = [u8; 5];

/// Numbers for [`Input::mutate`], the same for the same seed.
pub fn draws(seed: u64) -> impl FnMut() -> u64 {
    let mut random = Rng::with_seed(seed);
    move || random.u64(..)
}

/// One input.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Input {
    /// What is asked of the disk.
    pub requests: Vec<Asked>,
    /// Length of the file in sectors.
    pub sectors: u16,
    /// Sectors of the file, each without the zeros at its end.
    pub pieces: Vec<(u16, Vec<u8>)>,
}

/// Takes bytes off the front of `bytes`.
fn take<const N: usize>(bytes: &mut &[u8]) -> Option<[u8; N]> {
    let (first, rest) = bytes.split_first_chunk()?;
    *bytes = rest;
    Some(*first)
}

impl Input {
    /// What `bytes` say.
    pub fn decode(mut bytes: &[u8]) -> Input {
        let bytes = &mut bytes;
        let mut input = Input::default();
        let count = take(bytes).map_or(0, |[count]| usize::from(count) % (REQUESTS_MAX + 1));
        input.requests.extend((0..count).map_while(|_| take::<5>(bytes)));
        input.sectors = take(bytes).map_or(0, u16::from_be_bytes);
        while let Some([a, b, c, d]) = take(bytes) {
            let len = usize::from(u16::from_be_bytes([c, d])) % 513;
            let (piece, rest) = bytes.split_at(len.min(bytes.len()));
            input.pieces.push((u16::from_be_bytes([a, b]), piece.to_vec()));
            *bytes = rest;
        }
        input
    }

    /// The bytes that say this.
    pub fn encode(&self) -> Vec<u8> {
        let requests = &self.requests[..self.requests.len().min(REQUESTS_MAX)];
        let mut bytes = vec![requests.len() as u8];
        bytes.extend(requests.iter().flatten());
        bytes.extend(self.sectors.to_be_bytes());
        for (number, piece) in &self.pieces {
            bytes.extend(number.to_be_bytes());
            bytes.extend((piece.len() as u16).to_be_bytes());
            bytes.extend(piece);
        }
        bytes
    }

    /// An input about the file `bytes`, which is shorter than 32 MiB.
    pub fn of(bytes: &[u8], requests: Vec<Asked>) -> Input {
        let sectors = u16::try_from(bytes.len().div_ceil(512)).expect("a file of less than 32 MiB");
        let without_end =
            |sector: &[u8]| sector[..sector.iter().rposition(|&byte| byte != 0).map_or(0, |n| n + 1)].to_vec();
        let pieces = (0..).zip(bytes.chunks(512)).map(|(number, sector)| (number, without_end(sector)));
        Input { requests, sectors, pieces: pieces.filter(|(_, piece)| !piece.is_empty()).collect() }
    }

    /// The file.
    pub fn file(&self) -> Sparse {
        let mut file = Sparse::default();
        for (number, piece) in self.pieces.iter().filter(|(number, _)| *number < self.sectors) {
            file.write(FileOffset(u64::from(*number) * SECTOR), piece);
        }
        file.len = u64::from(self.sectors) * SECTOR;
        file
    }

    /// Changes something that is likely to matter.
    pub fn mutate(&mut self, mut draw: impl FnMut() -> u64) {
        let draw = &mut draw;
        for _ in 0..=draw() % 4 {
            match draw() % 16 {
                0..4 => self.mutate_header(draw),
                4..10 => self.mutate_entry(draw),
                10..12 => self.mutate_byte(draw),
                12 => self.move_sector(draw),
                13 => self.sectors = self.sectors.wrapping_add((draw() % 9) as u16).wrapping_sub(4),
                _ => self.mutate_request(draw),
            }
        }
    }

    fn piece(&mut self, draw: &mut impl FnMut() -> u64) -> Option<&mut Vec<u8>> {
        let index = (draw() as usize).checked_rem(self.pieces.len())?;
        self.pieces.get_mut(index).map(|(_, piece)| piece)
    }

    fn mutate_header(&mut self, draw: &mut impl FnMut() -> u64) {
        let Some((_, header)) = self.pieces.iter_mut().find(|(number, _)| *number == 0) else { return };
        let at = FIELDS[draw() as usize % FIELDS.len()];
        let last = at + 3;
        header.resize(header.len().max(last + 5), 0);
        match draw() % 6 {
            0 => header[last] = header[last].wrapping_add(1),
            1 => header[last] = header[last].wrapping_sub(1),
            2 => header[last] ^= 1 << (draw() % 8),
            3 => header[at + draw() as usize % 8] = draw() as u8,
            4 => header[at..=last].fill(0),
            _ => header[at..=last].fill(0xff),
        }
    }

    /// Changes eight bytes, which are an entry in most of the metadata.
    fn mutate_entry(&mut self, draw: &mut impl FnMut() -> u64) {
        let other = self.piece(draw).and_then(|piece| entry(piece, draw)).map_or(0, |(_, value)| value);
        let Some(piece) = self.piece(draw) else { return };
        let Some((at, value)) = entry(piece, draw) else { return };
        let new = match draw() % 8 {
            0 => other,
            1 => 0,
            2 => value.wrapping_add(SECTOR << (draw() % 8)),
            3 => value.wrapping_sub(SECTOR << (draw() % 8)),
            4 => value ^ 1 << (draw() % 64),
            _ => value ^ MARKS[draw() as usize % MARKS.len()],
        };
        // Sometimes where nothing was.
        let at = if draw() % 4 == 0 { draw() as usize % 64 * 8 } else { at };
        piece.resize(piece.len().max(at + 8), 0);
        piece[at..at + 8].copy_from_slice(&new.to_be_bytes());
    }

    fn mutate_byte(&mut self, draw: &mut impl FnMut() -> u64) {
        let Some(piece) = self.piece(draw) else { return };
        let Some(index) = (draw() as usize).checked_rem(piece.len()) else { return };
        piece[index] = match draw() % 4 {
            0 => piece[index].wrapping_add(1),
            1 => piece[index].wrapping_sub(1),
            _ => draw() as u8,
        };
    }

    fn move_sector(&mut self, draw: &mut impl FnMut() -> u64) {
        let Some(index) = (draw() as usize).checked_rem(self.pieces.len()) else { return };
        match draw() % 3 {
            0 => drop(self.pieces.remove(index)),
            1 => self.pieces[index].0 = self.pieces[draw() as usize % self.pieces.len()].0,
            _ => {
                let (number, piece) = self.pieces[index].clone();
                self.pieces.push((number.wrapping_add(1 << (draw() % 8)), piece));
            }
        }
    }

    fn mutate_request(&mut self, draw: &mut impl FnMut() -> u64) {
        let [.., what, high, low, count, fill] = draw().to_be_bytes();
        // Mostly where something is: at the disk's beginning.
        let high = if draw() % 4 == 0 { high } else { high % 4 };
        let request = [what, high, low, count, fill];
        match (draw() as usize).checked_rem(self.requests.len()) {
            Some(index) if self.requests.len() >= REQUESTS_MAX || draw() % 4 == 0 => self.requests[index] = request,
            _ => self.requests.push(request),
        }
    }
}

/// One of the entries of a sector that are not zero, and its place; or any, if all are.
fn entry(piece: &[u8], draw: &mut impl FnMut() -> u64) -> Option<(usize, u64)> {
    let value = |at: usize| {
        let mut bytes = [0; 8];
        let there = &piece[at..piece.len().min(at + 8)];
        bytes[..there.len()].copy_from_slice(there);
        u64::from_be_bytes(bytes)
    };
    let entries = (0..piece.len()).step_by(8).map(|at| (at, value(at)));
    let set: Vec<(usize, u64)> = entries.filter(|&(_, value)| value != 0).collect();
    let index = (draw() as usize).checked_rem(set.len())?;
    set.get(index).copied()
}
