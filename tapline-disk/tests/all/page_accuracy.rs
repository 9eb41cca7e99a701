//! The statistics page compared with an independent client that measures each of its requests itself.
//!
//! These hold however busy the machine is: the client offers a request before the disk's thread pops it, and sees its
//! completion after it was published. Two things are unknown to the client. The thread reads the clock once for all
//! requests found in one look at the ring, so a request that arrives during the look may count as popped before it was
//! offered, by at most the length of the look, which is part of `map`. And the client may see its completion while the
//! thread still signals it, which is `notify`.

use std::collections::HashMap;
use std::time::Duration;

use serde_json::json;
use stats::{Kind, Outcome, Reader, Record, Snapshot, Stage, bucket_bounds};

use crate::tool::Room;
use crate::tool::control::Control;
use crate::tool::served::Disk;
use crate::tool::vhost::{Asked, Timed};

/// The number of requests of each load.
const COUNT: u64 = 200;
/// The distance of requests, each of which has its own offset that identifies it.
const PLACE: u64 = 64 << 10;

/// Returns the maximum error of the page's clock if it reads the CPU's counter and compares that with the kernel's
/// clock ten times a second: a ten-thousandth in between. If it reads the kernel's clock each time, there is none.
fn clock_error(page: &Snapshot) -> u64 {
    if page.slow_clock { 0 } else { 10_000 }
}

/// The kinds of served images.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Image {
    Raw,
    /// With a parent that has data: a small write first reads the data around it, so that it has two consecutive
    /// operations.
    Child,
}

/// A disk that is served and traced from the beginning, and its client.
struct Watched {
    room: Room,
    control: Control,
    client: Timed,
    disk: Disk,
}

impl Watched {
    fn serve(image: Image) -> Watched {
        let room = Room::new();
        let image = match image {
            Image::Raw => {
                room.done("image create raw:a --size 64M");
                "raw:a"
            }
            Image::Child => {
                room.make_raw("parent", 64 << 20);
                room.done("image create qcow2:a --parent raw:parent");
                "qcow2:a --parent raw:parent"
            }
        };
        let words = format!("{image} --vhost-user vm.sock --control control.sock --stats-page page");
        let disk = Disk::serve(&room, &words);
        let mut control = Control::connect(&room.file("control.sock"));
        let client = Timed::connect(&room.file("vm.sock"), PLACE);
        assert_eq!(control.done(&json!({ "verb": "trace", "seconds": 3600 }))["next"], 0);
        Watched { room, control, client, disk }
    }

    /// Returns the page when it contains everything that the client has seen completed.
    fn page(&mut self) -> Page {
        let reader = Reader::open(&self.room.file("page")).unwrap();
        // The thread executes a verb only after it has counted its completions.
        self.control.done(&json!({ "verb": "version" }));
        let (snapshot, records) = (reader.snapshot().unwrap(), reader.records(0).unwrap());
        Page { reader, snapshot, records, read: stats::monotonic() }
    }
}

struct Page {
    reader: Reader,
    snapshot: Snapshot,
    records: Vec<Record>,
    read: u64,
}

impl Page {
    /// Asserts everything that must hold.
    fn agrees_with(&self, asked: &[Asked]) {
        assert!(asked.iter().all(|one| one.after > 0), "a request has no answer");
        for kind in Kind::ALL {
            self.counts_are_exact(kind, asked);
            self.sums_are_those_of_the_records(kind);
            self.histogram_is_that_of_the_records(kind);
        }
        for (record, asked) in self.pairs(asked) {
            self.is_within(record, asked);
        }
    }

    fn records(&self, kind: Kind) -> impl Iterator<Item = &Record> {
        self.records.iter().filter(move |record| record.kind == kind)
    }

    fn counts_are_exact(&self, kind: Kind, asked: &[Asked]) {
        let of_kind = || asked.iter().filter(|one| one.kind == kind);
        let (count, bytes) = (of_kind().count() as u64, of_kind().map(|one| one.len).sum::<u64>());
        let counts = self.snapshot.kind(kind);
        assert_eq!((counts.count(), counts.bytes(), counts.all_errors()), (count, bytes, 0), "{kind:?}");
        assert_eq!(self.records(kind).count() as u64, count, "{kind:?} in the trace");
    }

    fn sums_are_those_of_the_records(&self, kind: Kind) {
        for stage in Stage::ALL {
            let sum: u64 = self.records(kind).map(|record| record.stages[stage as usize]).sum();
            assert_eq!(self.snapshot.kind(kind).sum(stage), sum, "{kind:?}, {}", stage.name());
        }
        let longest = self.records(kind).map(Record::whole).max().unwrap_or(0);
        assert_eq!(self.snapshot.kind(kind).longest(), longest, "{kind:?}");
    }

    fn histogram_is_that_of_the_records(&self, kind: Kind) {
        let mut whole: Vec<u64> = self.records(kind).map(Record::whole).collect();
        whole.sort_unstable();
        let histogram = self.reader.histogram(kind, None).unwrap();
        assert_eq!(histogram.count(), whole.len() as u64, "{kind:?}");
        for (bucket, count) in histogram.buckets() {
            let (from, to) = bucket_bounds(*bucket);
            let inside = whole.iter().filter(|ns| (from..to).contains(ns)).count() as u64;
            assert_eq!(inside, *count, "{kind:?} of {from} to {to} ns");
        }
        for percent in [50, 99] {
            let exact = whole[(whole.len() * percent).div_ceil(100) - 1];
            let told = histogram.quantile(percent as f64 / 100.0).unwrap();
            // A bucket is as wide as a 512th of what is in it, or 1 ns.
            assert!(
                told.abs_diff(exact) <= exact / 512 + 1,
                "{kind:?}: {percent} % is {told}, and {exact} by the trace"
            );
        }
    }

    /// Returns the records, each with the client's request.
    fn pairs<'a>(&'a self, asked: &'a [Asked]) -> impl Iterator<Item = (&'a Record, &'a Asked)> {
        // Flushes have no offset: there is one at a time, so that they stay in order.
        let place = |kind, at, nth: &mut u64| {
            let flush = kind == Kind::Flush;
            *nth += u64::from(flush);
            (kind, if flush { *nth } else { at })
        };
        let mut nth = 0;
        let by_place: HashMap<_, _> = asked.iter().map(|one| (place(one.kind, one.at, &mut nth), one)).collect();
        assert_eq!(by_place.len(), asked.len(), "two requests have one place");
        let mut nth = 0;
        self.records.iter().map(move |record| (record, by_place[&place(record.kind, record.at, &mut nth)]))
    }

    /// Asserts that the times of the disk are within those of the client.
    fn is_within(&self, record: &Record, asked: &Asked) {
        assert_eq!((record.len, record.outcome), (asked.len, Outcome::Done), "{record:?}");
        // The stages are differences; `shown` is written separately.
        assert_eq!(record.seen + record.whole(), record.shown, "the stages do not add up: {record:?}");
        let error = clock_error(&self.snapshot);
        let [ring, map, .., notify] = record.stages;
        assert!(record.seen + ring + map + error >= asked.before, "begun before it was offered: {record:?}, {asked:?}");
        assert!(record.shown - notify <= asked.after + error, "answered after it was seen: {record:?}, {asked:?}");
        assert!(record.shown <= self.read + error, "shown after all was read: {record:?}");
    }
}

/// Keeps `depth` requests of all kinds in flight, at offsets from `first` on.
fn load(client: &mut Timed, depth: usize, first: u64) {
    let sizes = [512, 4096, PLACE];
    let mut flush_open = 0;
    for number in 0..COUNT {
        let mut kind = Kind::ALL[usize::try_from(number % 5).unwrap()];
        if kind == Kind::Flush && flush_open > 0 && client.asked()[flush_open].after == 0 {
            kind = Kind::Read;
        }
        if kind == Kind::Flush {
            flush_open = client.asked().len();
            client.ask(kind, 0, 0);
        } else {
            client.ask(kind, (first + number) * PLACE, sizes[usize::try_from(number / 5 % 3).unwrap()]);
        }
        if client.open() >= depth {
            client.take(1);
        }
    }
    while client.open() > 0 {
        client.take(1);
    }
}

fn agrees_at_several_depths(image: Image) {
    let mut watched = Watched::serve(image);
    // Offsets are used once, and all loads together fit on the disk.
    for (nth, depth) in [1, 4, 16, 200].into_iter().enumerate() {
        load(&mut watched.client, depth, nth as u64 * COUNT);
    }
    let page = watched.page();
    page.agrees_with(watched.client.asked());
    let splits = page.records.iter().filter(|record| record.stages[Stage::Split as usize] > 0).count() as u64;
    assert_eq!(Kind::ALL.map(|kind| page.snapshot.kind(kind).splits()).iter().sum::<u64>(), splits);
    assert_eq!(splits > 0, image == Image::Child, "{splits} requests have several operations in turn");
    assert_eq!(watched.disk.stop().0, Some(0));
}

#[test]
fn the_page_of_a_raw_disk_agrees_with_an_independent_client() {
    agrees_at_several_depths(Image::Raw);
}

#[test]
fn the_page_of_a_qcow2_child_agrees_with_an_independent_client() {
    agrees_at_several_depths(Image::Child);
}

#[test]
fn the_time_of_a_held_request_includes_the_wait() {
    let mut watched = Watched::serve(Image::Child);
    watched.control.done(&json!({ "verb": "pause" }));
    for (place, kind) in Kind::ALL.into_iter().enumerate() {
        watched.client.ask(kind, place as u64 * PLACE, if kind == Kind::Flush { 0 } else { 4096 });
    }
    watched.client.take(0);
    let reader = Reader::open(&watched.room.file("page")).unwrap();
    while reader.snapshot().unwrap().in_flight.len() < Kind::ALL.len() {
        std::thread::sleep(Duration::from_millis(1));
    }
    let from = stats::monotonic();
    std::thread::sleep(Duration::from_millis(50));
    let to = stats::monotonic();
    watched.control.done(&json!({ "verb": "resume" }));
    while watched.client.open() > 0 {
        watched.client.take(1);
    }
    let page = watched.page();
    page.agrees_with(watched.client.asked());
    for record in &page.records {
        assert!(record.whole() + clock_error(&page.snapshot) >= to - from, "held for {} ns: {record:?}", to - from);
    }
    assert_eq!(watched.disk.stop().0, Some(0));
}
