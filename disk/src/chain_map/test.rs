//! The map against a naive one, and what it forgets.

#![allow(clippy::cast_possible_truncation, reason = "sizes of tests fit")]

use super::*;
use crate::{DiskOffset, FileId, FileOffset};

const BUDGET: usize = 22 << 20;

fn data(file: u8, at: u64) -> Location {
    Location::Data { file: FileId(file), at: FileOffset(at) }
}

fn run(at: u64, len: u64, place: Location) -> Run {
    Run { span: Span { at: DiskOffset(at), len }, place }
}

/// Learns a chunk of `count` runs, each in another place.
fn load_mixed(map: &mut ChainMap, chunk: u64, count: u64) {
    let (at, len) = (chunk * CHUNK, CHUNK / count);
    let runs: Vec<Run> = (0..count).map(|i| run(at + i * len, len, data(u8::from(i % 2 == 1), i << 24))).collect();
    map.insert(Span { at: DiskOffset(at), len: CHUNK }, &runs);
}

fn load_whole(map: &mut ChainMap, chunk: u64) {
    let at = chunk * CHUNK;
    map.insert(Span { at: DiskOffset(at), len: CHUNK }, &[run(at, CHUNK, data(0, at))]);
}

#[test]
fn an_overlay_splits_and_joins_runs() {
    let mut map = ChainMap::new(4 * CHUNK, BUDGET);
    map.insert(ChainMap::chunk_of(DiskOffset(0)), &[run(0, CHUNK, data(3, 1 << 30))]);
    map.overlay(Span { at: DiskOffset(4096), len: 4096 }, data(0, 8192));
    assert_eq!(map.lookup(DiskOffset(0)), Some((data(3, 1 << 30), 4096)));
    assert_eq!(map.lookup(DiskOffset(5120)), Some((data(0, 9216), 3072)));
    assert_eq!(map.lookup(DiskOffset(8192)), Some((data(3, (1 << 30) + 8192), CHUNK - 8192)));
    map.overlay(Span { at: DiskOffset(0), len: 4096 }, data(0, 4096));
    assert_eq!(map.lookup(DiskOffset(0)), Some((data(0, 4096), 8192)));
    map.overlay(Span { at: DiskOffset(0), len: CHUNK }, Location::Zero);
    assert_eq!(map.lookup(DiskOffset(77)), Some((Location::Zero, CHUNK - 77)));
}

#[test]
fn an_overlay_on_the_unknown_stays_unknown() {
    let mut map = ChainMap::new(4 * CHUNK, BUDGET);
    map.insert(ChainMap::chunk_of(DiskOffset(CHUNK)), &[run(CHUNK, CHUNK, Location::Zero)]);
    map.overlay(Span { at: DiskOffset(CHUNK - 512), len: 1024 }, data(0, 0));
    assert_eq!(map.lookup(DiskOffset(CHUNK - 512)), None);
    assert_eq!(map.lookup(DiskOffset(CHUNK)), Some((data(0, 512), 512)));
    assert_eq!(map.lookup(DiskOffset(CHUNK + 512)), Some((Location::Zero, CHUNK - 512)));
}

#[test]
fn what_is_forgotten_stays_unknown_until_it_is_learned() {
    let mut map = ChainMap::new(4 * CHUNK, BUDGET);
    load_mixed(&mut map, 1, 512);
    map.forget(DiskOffset(CHUNK + 5));
    map.overlay(Span { at: DiskOffset(CHUNK), len: CHUNK }, data(1, 0));
    assert_eq!(map.lookup(DiskOffset(CHUNK)), None);
    load_whole(&mut map, 1);
    assert_eq!(map.lookup(DiskOffset(CHUNK)), Some((data(0, CHUNK), CHUNK)));
}

#[test]
fn a_disk_that_has_grown_learns_its_last_chunk_again() {
    let mut map = ChainMap::new(CHUNK / 2, BUDGET);
    map.insert(ChainMap::chunk_of(DiskOffset(0)), &[run(0, CHUNK / 2, Location::Zero)]);
    map.grow(5000 * CHUNK);
    assert_eq!(map.lookup(DiskOffset(0)), None);
    load_whole(&mut map, 4999);
    assert!(map.lookup(DiskOffset(4999 * CHUNK)).is_some());
}

#[test]
fn a_place_that_is_packed_is_found_again() {
    let places = [
        Location::Zero,
        data(0, 0),
        data(59, 1 << 60),
        data(255, 512),
        Location::Compressed { file: FileId(0) },
        Location::Compressed { file: FileId(255) },
    ];
    for place in places {
        assert_eq!(Compact::of(place).place(), place);
    }
}

/// However the pages are scattered, and nothing for the runs.
#[test]
fn a_chunk_scattered_by_pages_takes_four_bytes_a_page() {
    let mut map = ChainMap::new(CHUNK, BUDGET);
    load_whole(&mut map, 0);
    let whole = map.bytes();
    load_mixed(&mut map, 0, 512);
    assert!(map.bytes() - whole <= 512 * 4 + 16, "{}", map.bytes() - whole);
    map.overlay(Span { at: DiskOffset(7 << 12), len: 2 << 12 }, data(1, 5 << 12));
    assert!(map.bytes() - whole <= 512 * 4 + 16, "and when one of them is written elsewhere");
    assert_eq!(map.lookup(DiskOffset((8 << 12) + 5)), Some((data(1, (6 << 12) + 5), 4091)));
    // Four bytes do not say where this is.
    map.overlay(Span { at: DiskOffset(7 << 12), len: 1 << 12 }, data(1, 1 << 40));
    assert_eq!(map.lookup(DiskOffset(7 << 12)), Some((data(1, 1 << 40), 4096)));
    assert_eq!(map.lookup(DiskOffset(8 << 12)), Some((data(1, 6 << 12), 4096)));
    assert!(map.bytes() - whole <= 512 * 8 + 16, "{}", map.bytes() - whole);
}

#[test]
fn a_chunk_scattered_by_the_usual_clusters_takes_four_bytes_a_cluster() {
    let mut map = ChainMap::new(CHUNK, BUDGET);
    load_whole(&mut map, 0);
    let whole = map.bytes();
    load_mixed(&mut map, 0, 32);
    assert!(map.bytes() - whole <= 32 * 4 + 8 + 16, "{}", map.bytes() - whole);
    map.overlay(Span { at: DiskOffset(7 << 16), len: 2 << 16 }, data(1, 5 << 16));
    assert!(map.bytes() - whole <= 32 * 4 + 8 + 16, "and when one of them is written elsewhere");
    assert_eq!(map.lookup(DiskOffset(8 << 16)), Some((data(1, 6 << 16), 1 << 16)));
}

/// Scope: every number of runs that a chunk can have.
#[test]
fn no_number_of_runs_is_taken_for_pages() {
    let mut map = ChainMap::new(CHUNK, BUDGET);
    for count in 2..=4096u64 {
        let unit = |i: u64| run(i * 512, if i + 1 == count { CHUNK - i * 512 } else { 512 }, data(0, i << 24));
        map.insert(ChainMap::chunk_of(DiskOffset(0)), &(0..count).map(unit).collect::<Vec<_>>());
        let last = (count - 1) * 512;
        assert_eq!(map.lookup(DiskOffset(last - 512)), Some((data(0, (count - 2) << 24), 512)), "{count} runs");
        assert_eq!(map.lookup(DiskOffset(last)).map(|found| found.0), Some(data(0, (count - 1) << 24)), "{count} runs");
    }
}

/// A map beside one that keeps a place for every sector.
struct Pair {
    map: ChainMap,
    naive: Vec<Option<Location>>,
    random: Rng,
    /// The disk's length.
    len: u64,
}

impl Pair {
    fn new(seed: u64, chunks: u64, budget: usize) -> Pair {
        println!("seed {seed}, budget {budget}");
        let len = chunks * CHUNK - 512 * 3;
        let (map, random) = (ChainMap::new(len, budget), Rng::with_seed(seed));
        Pair { map, naive: vec![None; (len / 512) as usize], random, len }
    }

    fn draw(&mut self, below: u64) -> u64 {
        self.random.u64(..below)
    }

    /// A place at a multiple of `unit` in a file.
    fn place(&mut self, unit: u64) -> Location {
        match self.draw(6) {
            0 => Location::Zero,
            1 => Location::Compressed { file: FileId(self.draw(3) as u8) },
            _ => data(self.draw(4) as u8, self.draw(1 << 20) * unit),
        }
    }

    fn lay(&mut self, span: Span, place: Location, everywhere: bool) {
        for at in (span.at.0..span.end().0).step_by(512).map(DiskOffset) {
            let sector = &mut self.naive[(at / 512) as usize];
            if everywhere || sector.is_some() {
                *sector = Some(place.advanced(at - span.at));
            }
        }
    }

    /// Learns a chunk in runs of whole units.
    fn insert(&mut self) {
        let chunk = ChainMap::chunk_of(DiskOffset(self.draw(self.len)));
        let inside = chunk.intersection(Span { at: DiskOffset(0), len: self.len }).unwrap();
        let unit = [512, 1024, 4096, 65536, CHUNK][self.draw(5) as usize];
        let places = [512, unit][self.draw(2) as usize];
        let mut runs = Vec::new();
        let mut at = inside.at;
        while at < inside.end() {
            let span = Span { at, len: (unit * (1 + self.draw(3))).min(inside.end() - at) };
            let place = self.place(places);
            self.lay(span, place, true);
            append(&mut runs, Run { span, place });
            at = span.end();
        }
        self.map.insert(chunk, &runs);
    }

    fn overlay(&mut self) {
        let unit = [512, 4096, 65536][self.draw(3) as usize];
        let at = self.draw(self.len / unit) * unit;
        let long = if self.draw(10) == 0 { 3 * CHUNK / unit } else { 20 };
        let span = Span { at: DiskOffset(at), len: ((1 + self.draw(long)) * unit).min(self.len - at) };
        let places = [512, unit][self.draw(2) as usize];
        let place = self.place(places);
        self.map.overlay(span, place);
        self.lay(span, place, false);
    }

    fn look(&mut self) -> bool {
        let at = self.draw(self.len / 512) * 512;
        let Some((place, len)) = self.map.lookup(DiskOffset(at)) else { return false };
        for into in (0..len.min(self.len - at)).step_by(512) {
            assert_eq!(self.naive[((at + into) / 512) as usize], Some(place.advanced(into)), "{at} and {into}");
        }
        true
    }

    fn forget(&mut self) {
        let chunk = ChainMap::chunk_of(DiskOffset(self.draw(self.len)));
        self.map.forget(chunk.at);
        assert_eq!(self.map.lookup(chunk.at), None);
        let inside = chunk.intersection(Span { at: DiskOffset(0), len: self.len }).unwrap();
        self.naive[(inside.at / 512) as usize..(inside.end() / 512) as usize].fill(None);
    }
}

/// Scope: 16 seeds of 1500 steps on 24 chunks; with memory for all, for a few, and for next to none.
#[test]
fn the_map_agrees_with_a_naive_one_or_does_not_know() {
    for seed in 0..16 {
        let budget = [BUDGET, 60_000, 12_000, 0][seed as usize % 4];
        let mut pair = Pair::new(seed, 24, budget);
        let mut found = 0;
        for _ in 0..1500 {
            match pair.draw(8) {
                0 => pair.insert(),
                1..4 => pair.overlay(),
                4 if pair.draw(8) == 0 => pair.forget(),
                _ => found += usize::from(pair.look()),
            }
            let kept = pair.map.bytes() <= budget || pair.map.known.is_empty();
            assert!(kept, "{} bytes of {budget}", pair.map.bytes());
            let counted = pair.map.chunks.counted() + pair.map.known.capacity() * 4;
            assert_eq!(pair.map.bytes(), counted, "the sum is kept up to date");
        }
        assert!(budget < BUDGET || found > 300, "{found} lookups found something");
    }
}

/// Looks up `lookups` chunks as `next` says, learning what is not known; the part that was known.
fn hit_rate(map: &mut ChainMap, lookups: u64, runs: u64, mut next: impl FnMut(u64) -> u64) -> f64 {
    let mut hits = 0;
    for i in 0..lookups {
        let chunk = next(i);
        if map.lookup(DiskOffset(chunk * CHUNK)).is_some() {
            hits += 1;
        } else {
            load_mixed(map, chunk, runs);
        }
    }
    f64::from(hits) / lookups as f64
}

/// How many chunks of `runs` runs there is room for.
fn room_for(budget: usize, runs: u64) -> u64 {
    let mut map = ChainMap::new(1 << 40, budget);
    (0..100_000).for_each(|chunk| load_mixed(&mut map, chunk, runs));
    map.known.len() as u64
}

/// Scope: working sets from 0.9 to 4 times of what there is room for, read at random and round and round.
#[test]
fn a_working_set_larger_than_the_budget_is_found_in_proportion() {
    let budget = 1 << 20;
    let room = room_for(budget, 32);
    assert!(room > 2000, "room for {room}");
    for tenths in [9, 11, 15, 20, 40] {
        let set = room * tenths / 10;
        let mut random = Rng::with_seed(7);
        let mut map = ChainMap::new(1 << 40, budget);
        hit_rate(&mut map, 6 * set, 32, |_| random.u64(..set));
        let found = hit_rate(&mut map, 4 * set, 32, |_| random.u64(..set));
        let share = (10.0 / tenths as f64).min(1.0);
        assert!(found > share * 0.9, "{tenths} tenths at random: {found:.3} found, {share:.3} in memory");
        let mut map = ChainMap::new(1 << 40, budget);
        hit_rate(&mut map, 6 * set, 32, |i| i % set);
        let found = hit_rate(&mut map, 4 * set, 32, |i| i % set);
        println!("{tenths} tenths, round and round: {found:.3} found, {share:.3} in memory");
        assert!(found >= share.powi(3), "{tenths} tenths round and round: {found:.3} found");
    }
}

#[test]
fn what_is_used_often_stays() {
    let budget = 1 << 20;
    let room = room_for(budget, 32);
    let mut map = ChainMap::new(1 << 40, budget);
    let hot = room / 4;
    let mut random = Rng::with_seed(7);
    let mut missed = 0;
    // Every second look is at a hot chunk, the others are at the rest of the disk once each.
    for i in 0..20 * room {
        let chunk = random.u64(..hot);
        if map.lookup(DiskOffset(chunk * CHUNK)).is_none() {
            missed += u64::from(i > 2 * room);
            load_mixed(&mut map, chunk, 32);
        }
        load_mixed(&mut map, hot + i, 32);
    }
    // Were use not regarded, it would be one in five.
    assert!(missed < 18 * room / 10, "{missed} of {} looks at hot chunks missed", 18 * room);
}

#[test]
fn sixteen_tebibytes_in_sequence_stay_within_the_budget() {
    let mut map = ChainMap::new(16 << 40, 2 << 20);
    let mut most = 0;
    // Every sixteenth chunk, so that all of the disk is touched.
    for chunk in (0..(16 << 40) / CHUNK).step_by(16) {
        load_whole(&mut map, chunk);
        most = most.max(map.bytes());
    }
    assert!(most <= 2 << 20, "{most} bytes");
}

#[test]
fn a_tebibyte_in_sequence_is_known_as_a_whole() {
    let mut map = ChainMap::new(1 << 40, BUDGET);
    let chunks = (1u64 << 40) / CHUNK;
    (0..chunks).for_each(|chunk| load_whole(&mut map, chunk));
    assert_eq!(map.known.len() as u64, chunks);
    assert!(map.bytes() < 12 << 20, "{} bytes", map.bytes());
}

#[test]
fn a_disk_of_exbibytes_is_no_burden() {
    let mut map = ChainMap::new(u64::MAX, BUDGET);
    load_whole(&mut map, 7);
    load_whole(&mut map, u64::MAX / CHUNK);
    assert!(map.lookup(DiskOffset(7 * CHUNK)).is_some());
    assert_eq!(map.lookup(DiskOffset(u64::MAX / CHUNK * CHUNK)), None);
    assert!(map.bytes() <= BUDGET);
}
