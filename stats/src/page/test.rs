//! Tests of the page: what a reader finds after everything that can happen to its writer.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use fastrand::Rng;

use super::histograms::ASK_AGAIN;
use super::*;
use crate::histogram::bucket_of;
use crate::{Histogram, Reader};

/// Where a test goes on that runs in a process of its own.
const ROOM: &str = "TAPLINE_TEST_ROOM";

fn file() -> File {
    tempfile::tempfile().unwrap()
}

fn begun(file: &File) -> Page {
    Page::begin(file.try_clone().unwrap(), Source::Counter, "{\"image\":\"raw:a\"}").unwrap()
}

fn reader(file: &File) -> Reader {
    Reader::of(file.try_clone().unwrap()).unwrap()
}

/// A request of 4 KiB that is seen at `at` and takes 100, 200, 0, 300, 4000, 500 and 600 ns in its stages.
fn serve(page: &mut Page, kind: Kind, at: u64) {
    let slot = page.came(kind, at + 100, 8192, 4096);
    let spent = Spent { seen: at, taken: at + 100, begun: at + 300, ended: at + 4600, split: 0, queue: 300 };
    page.ended(kind, slot, 4096, Outcome::Done, &spent, at + 5100);
    page.publish_batch(at + 5700);
}

#[test]
fn a_reader_finds_what_was_counted_and_the_stages_add_up() {
    let file = file();
    let mut page = begun(&file);
    (1..=100).for_each(|at| serve(&mut page, Kind::Write, at * 10_000));
    let read = reader(&file).snapshot().unwrap();
    let writes = read.kind(Kind::Write);
    assert_eq!((writes.count(), writes.bytes(), read.in_flight(Kind::Write), read.torn), (100, 409_600, 0, false));
    let sums: Vec<u64> = Stage::ALL.iter().map(|stage| writes.sum(*stage) / 100).collect();
    assert_eq!(sums, [100, 200, 0, 300, 4000, 500, 600]);
    assert_eq!((writes.sum_of_all(), writes.longest()), (570_000, 5700));
    assert_eq!(read.kind(Kind::Read), crate::KindCounts::default());
    assert_eq!((read.pid, read.incarnation), (Some(std::process::id()), 1));
    assert_eq!(read.identity, "{\"image\":\"raw:a\"}");
    let whole = reader(&file).histogram(Kind::Write, None).unwrap();
    assert_eq!(whole, Histogram::of([(bucket_of(5700), 100)]));
    assert_eq!(reader(&file).histogram(Kind::Write, Some(Stage::Storage)).unwrap().count(), 100);
    assert_eq!(reader(&file).histogram(Kind::Write, Some(Stage::Split)).unwrap().count(), 0);
}

#[test]
fn a_request_in_flight_is_seen_with_its_age_and_stage() {
    let file = file();
    let mut page = begun(&file);
    let early = page.came(Kind::Read, 1000, 512, 4096);
    let late = page.came(Kind::Read, 3000, 1024, 512);
    page.submitted(early, 2000);
    page.publish_batch(4000);
    let read = reader(&file).snapshot().unwrap();
    let seen: Vec<_> = read.in_flight.iter().map(|request| (request.at, request.len, request.stage())).collect();
    assert_eq!(seen, [(512, 4096, Stage::Storage), (1024, 512, Stage::Map)]);
    assert_eq!(read.oldest(Kind::Read), Some(read.read - 1000));
    assert_eq!((read.in_flight(Kind::Read), read.oldest(Kind::Write)), (2, None));
    assert_eq!(page.in_flight(Kind::Read, 5000), (2, 4000 + 2000));
    page.given_back(late);
    page.given_back(early);
    page.publish_batch(5000);
    let read = reader(&file).snapshot().unwrap();
    assert_eq!((read.in_flight.len(), read.kind(Kind::Read).count()), (0, 0));
}

#[test]
fn a_traced_request_is_kept_with_its_stages_and_old_ones_are_overwritten() {
    let file = file();
    let mut page = begun(&file);
    serve(&mut page, Kind::Read, 1000);
    page.trace(u64::MAX).unwrap();
    let failed = page.came(Kind::Write, 20_000, 512, 1024);
    page.ended(
        Kind::Write,
        failed,
        1024,
        Outcome::NoSpace,
        &Spent { seen: 19_000, taken: 20_000, ..Spent::default() },
        25_000,
    );
    page.publish_batch(26_000);
    serve(&mut page, Kind::Read, 30_000);
    let records = reader(&file).records(0).unwrap();
    let seen: Vec<_> = records.iter().map(|one| (one.number, one.kind, one.outcome, one.at, one.len)).collect();
    assert_eq!(seen, [(0, Kind::Write, Outcome::NoSpace, 512, 1024), (1, Kind::Read, Outcome::Done, 8192, 4096)]);
    assert_eq!(records[0].stages, [1000, 5000, 0, 0, 0, 0, 1000]);
    assert_eq!((records[1].stages, records[1].whole()), ([100, 200, 0, 300, 4000, 500, 600], 5700));
    (0..RECORDS as u64 + 10).for_each(|at| serve(&mut page, Kind::Flush, 100_000 + at * 10_000));
    let left = reader(&file).records(1).unwrap();
    assert_eq!((left.len(), left[0].number), (RECORDS, 12));
    // Two came before these.
    let seen = |number: u64| 100_000 + (number - 2) * 10_000;
    let found = (12..).zip(&left);
    assert!(found.into_iter().all(|(n, one)| (one.number, one.seen, one.shown) == (n, seen(n), seen(n) + 5700)));
    assert_eq!(reader(&file).records(RECORDS as u64 + 11).unwrap(), left[RECORDS - 1..]);
    let before = reader(&file).snapshot().unwrap();
    page.trace(0).unwrap();
    serve(&mut page, Kind::Flush, 1);
    assert_eq!(reader(&file).traced().unwrap(), (RECORDS as u64 + 12, None));
    assert!(reader(&file).records(0).unwrap().is_empty(), "its memory is given back");
    assert_eq!(reader(&file).snapshot().unwrap().kind(Kind::Flush).count(), before.kind(Kind::Flush).count() + 1);
}

#[test]
fn a_trace_ends_at_its_time() {
    let file = file();
    let mut page = begun(&file);
    page.trace(50_000).unwrap();
    (0..10).for_each(|at| serve(&mut page, Kind::Read, at * 10_000));
    let (count, until) = reader(&file).traced().unwrap();
    assert_eq!((count, until), (6, None), "the first answer after it ends it");
}

#[test]
fn more_requests_than_slots_are_counted_and_their_slots_used_again() {
    let file = file();
    let mut page = begun(&file);
    let slots: Vec<Slot> = (0..=u64::from(SLOTS)).map(|at| page.came(Kind::Flush, at + 1, 0, 0)).collect();
    page.publish_batch(1);
    let read = reader(&file).snapshot().unwrap();
    assert_eq!((read.in_flight.len(), read.count(Count::NotInSlot)), (SLOTS.into(), 1));
    slots.into_iter().for_each(|slot| page.given_back(slot));
    page.publish_batch(2);
    let read = reader(&file).snapshot().unwrap();
    assert_eq!((read.in_flight.len(), read.count(Count::NotInSlot)), (0, 0));
}

#[test]
fn the_next_process_continues_the_counters_though_the_last_one_was_killed_while_it_wrote() {
    let file = file();
    let mut page = begun(&file);
    serve(&mut page, Kind::Read, 10_000);
    page.came(Kind::Read, 20_000, 0, 512);
    page.count(Count::Sleeps, 7);
    page.publish_batch(21_000);
    page.store(SEQUENCE_AT, page.sequence | 1);
    drop(page);
    assert!(reader(&file).snapshot().unwrap().torn, "it was killed between two changes of the number");
    let mut next = begun(&file);
    let read = reader(&file).snapshot().unwrap();
    assert_eq!((read.torn, read.incarnation, read.in_flight.len()), (false, 2, 0));
    assert_eq!((read.kind(Kind::Read).count(), read.in_flight(Kind::Read)), (1, 0));
    assert_eq!(read.count(Count::Sleeps), 7);
    serve(&mut next, Kind::Read, 30_000);
    assert_eq!(reader(&file).snapshot().unwrap().kind(Kind::Read).count(), 2);
    assert_eq!(reader(&file).histogram(Kind::Read, None).unwrap().count(), 2);
    next.leave();
    assert_eq!(reader(&file).snapshot().unwrap().pid, None);
}

#[test]
fn a_page_of_another_version_is_refused_by_readers_and_begun_anew_by_a_process() {
    let file = file();
    serve(&mut begun(&file), Kind::Read, 10_000);
    file.write_all_at(&9u64.to_ne_bytes(), VERSION_AT as u64).unwrap();
    let refused = Reader::of(file.try_clone().unwrap()).unwrap_err();
    assert!(refused.to_string().contains("version 9"), "{refused}");
    drop(begun(&file));
    let read = reader(&file).snapshot().unwrap();
    assert_eq!((read.kind(Kind::Read).count(), read.incarnation), (0, 1));
    assert_eq!(reader(&file).histogram(Kind::Read, None).unwrap().count(), 0);
}

#[test]
fn a_file_of_something_else_is_not_written_to() {
    let other = file();
    other.write_all_at(&[7; 9000], 0).unwrap();
    let refused = Page::begin(other.try_clone().unwrap(), Source::Counter, "{}").err().unwrap();
    assert!(refused.to_string().contains("not a statistics page"), "{refused}");
    let mut bytes = vec![0; 9000];
    other.read_exact_at(&mut bytes, 0).unwrap();
    assert!(bytes == [7; 9000] && other.metadata().unwrap().len() == 9000);
    // A process was killed before its page had its first bytes.
    let young = file();
    young.set_len(PAGE_LEN as u64).unwrap();
    drop(begun(&young));
    let room = tempfile::tempdir().unwrap();
    let fifo = room.path().join("fifo");
    rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, rustix::fs::Mode::RUSR).unwrap();
    assert!(matches!(Reader::open(&fifo), Err(crate::ReadError::NotAPage)));
}

#[test]
fn what_is_no_page_is_refused_by_readers() {
    let short = file();
    short.set_len(100).unwrap();
    let zeroes = file();
    zeroes.set_len(PAGE_LEN as u64).unwrap();
    let cut = file();
    drop(begun(&cut));
    let open = reader(&cut);
    cut.set_len(4096).unwrap();
    assert!(matches!(Reader::of(short), Err(crate::ReadError::NotAPage)));
    for file in [file(), zeroes] {
        assert!(matches!(Reader::of(file), Err(crate::ReadError::NotStarted)));
    }
    assert!(open.snapshot().is_ok(), "nothing is in flight");
    assert!(open.histogram(Kind::Read, None).unwrap().buckets().is_empty());
    cut.set_len(100).unwrap();
    assert!(matches!(open.snapshot(), Err(crate::ReadError::NotAPage)));
}

#[test]
fn a_page_that_a_hostile_process_has_written_is_read_without_harm() {
    let file = file();
    drop(begun(&file));
    let mut random = Rng::with_seed(1);
    for at in (16 + 8..HISTOGRAMS_AT + ROW_LEN).step_by(8) {
        file.write_all_at(&random.u64(..1 << 63).to_ne_bytes(), at as u64).unwrap();
    }
    let read = reader(&file).snapshot().unwrap();
    assert!(read.identity.len() <= 3 * IDENTITY_MAX && read.in_flight.len() <= SLOTS.into());
    let all = read.all_kinds();
    assert!(all.all_errors() > 0 && all.sum_of_all() > 0);
    let histogram = reader(&file).histogram(Kind::Read, Some(Stage::Ring)).unwrap();
    assert!(histogram.quantile(0.99).is_some() && histogram.since(&histogram).count() == 0);
}

#[test]
fn a_count_of_traced_requests_that_cannot_be_is_neither_continued_nor_read() {
    let file = file();
    let mut page = begun(&file);
    file.write_all_at(&u64::MAX.to_ne_bytes(), TRACED_AT as u64).unwrap();
    assert!(reader(&file).records(0).unwrap().is_empty());
    assert_eq!(page.trace(u64::MAX).unwrap(), 0);
    serve(&mut page, Kind::Read, 1000);
    assert_eq!(reader(&file).records(0).unwrap().len(), 1);
}

#[test]
fn a_text_that_is_too_long_is_left_out() {
    let file = file();
    let text = format!("{{\"image\":\"{}\"}}", "x".repeat(IDENTITY_MAX));
    drop(Page::begin(file.try_clone().unwrap(), Source::Kernel, &text).unwrap());
    let read = reader(&file).snapshot().unwrap();
    assert_eq!((read.identity.as_str(), read.slow_clock), ("{}", true));
}

#[test]
fn a_histogram_takes_memory_only_for_the_magnitudes_that_occur() {
    use std::os::unix::fs::MetadataExt;
    let file = file();
    let mut page = begun(&file);
    let before = file.metadata().unwrap().blocks();
    (1..=1000).for_each(|at| serve(&mut page, Kind::Write, at * 10_000));
    let taken = (file.metadata().unwrap().blocks() - before) * 512;
    // One page for each of six stages and the whole, and perhaps one for the file system's own use.
    assert!((7 * 4096..=8 * 4096).contains(&taken), "{taken}");
}

#[test]
fn a_full_file_system_costs_histograms_and_nothing_else() {
    let room = tempfile::tempdir().unwrap();
    let mount = format!("mount -t tmpfs -o size=64k none {} && exec \"$0\" \"$@\"", room.path().display());
    let mut inside = Command::new("unshare");
    inside.args(["--user", "--map-root-user", "--mount", "sh", "-c", &mount]);
    inside.arg(std::env::current_exe().unwrap());
    inside.args(["--exact", "page::test::inside_a_full_file_system", "--nocapture"]).env(ROOM, room.path());
    let said = inside.output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&said.stdout), String::from_utf8_lossy(&said.stderr));
    assert!(said.status.success() && out.contains("1 passed"), "{out}\n{err}");
}

/// The part of another test that runs in a mount namespace of its own.
#[test]
fn inside_a_full_file_system() {
    let Some(room) = std::env::var_os(ROOM) else { return };
    let create = |name: &str| {
        let path = Path::new(&room).join(name);
        File::options().read(true).write(true).create_new(true).open(path).unwrap()
    };
    let file = create("page");
    let mut page = begun(&file);
    std::io::Write::write_all(&mut create("filler"), &[1; 1 << 20]).unwrap_err();
    (1..=10).for_each(|at| serve(&mut page, Kind::Write, at * 10_000));
    let read = reader(&file).snapshot().unwrap();
    assert_eq!(read.kind(Kind::Write).count(), 10);
    assert_eq!(read.count(Count::NotInHistogram), 70);
    std::fs::remove_file(Path::new(&room).join("filler")).unwrap();
    (1..=ASK_AGAIN).for_each(|at| serve(&mut page, Kind::Write, at * 10_000));
    assert!(reader(&file).histogram(Kind::Write, None).unwrap().count() > 0, "there is room again");
}
