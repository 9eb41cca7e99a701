//! Rates and queue sizes of pages whose requests have given durations.

use stats::{Kind, Outcome, Page, Source, Spent, Stage};

use super::super::fixture::{MS, SECOND, Written, open};
use super::*;

/// Whether two values are equal to within rounding.
fn is(value: f64, right: f64) -> bool {
    (value - right).abs() < 1e-9 * right.max(1.0)
}

fn written(room: &tempfile::TempDir) -> Written {
    Written::at(room.path().join("a.page"), "raw:a")
}

#[test]
fn rates_are_per_second_of_the_measured_interval() {
    let room = tempfile::tempdir().unwrap();
    let mut page = written(&room);
    page.ended(Kind::Read, 7, 512, MS);
    let before = page.read_at(10 * SECOND);
    page.ended(Kind::Read, 100, 4096, 9 * MS);
    page.ended(Kind::Write, 10, 8192, 19 * MS);
    let rates = between(&before, &page.read_at(10 * SECOND + 2500 * MS)).unwrap();
    assert!(is(rates.seconds, 2.5), "{rates:?}");
    let (reads, writes) = (rates.kind(Kind::Read), rates.kind(Kind::Write));
    assert!(is(reads.per_second, 40.0) && is(reads.bytes_per_second, 40.0 * 4096.0), "{reads:?}");
    assert!(is(writes.per_second, 4.0) && is(writes.bytes_per_second, 4.0 * 8192.0), "{writes:?}");
    // 100 reads of 10 ms and 10 writes of 20 ms in 2.5 s; 110 ms in total before they were submitted.
    assert!(is(reads.queue, 0.4) && is(writes.queue, 0.08), "{rates:?}");
    assert!(is(rates.all().layer(Layer::Tapline), 0.044) && is(rates.all().layer(Layer::Storage), 0.436), "{rates:?}");
    assert!(is(rates.all().layer(Layer::Ring), 0.0));
    assert!(is(rates.average_size().unwrap(), (100.0 * 4096.0 + 10.0 * 8192.0) / 110.0));
}

#[test]
fn a_stuck_request_is_a_queue_of_one_until_it_ends() {
    let room = tempfile::tempdir().unwrap();
    let mut page = written(&room);
    let slot = page.page.came(Kind::Write, 10 * SECOND, 4096, 512);
    page.page.submitted(slot, 10 * SECOND + 250 * MS);
    // The reading is older than the request.
    let mut before = page.read_at(9 * SECOND + 500 * MS);
    before.in_flight.clear();
    let came = between(&before, &page.read_at(10 * SECOND + 500 * MS)).unwrap().kind(Kind::Write);
    assert!(
        is(came.queue, 0.5) && is(came.stage(Stage::Map), 0.25) && is(came.stage(Stage::Storage), 0.25),
        "{came:?}"
    );
    for second in [11, 12, 600] {
        let (before, now) = (page.read_at(second * SECOND), page.read_at((second + 1) * SECOND));
        let stuck = between(&before, &now).unwrap().kind(Kind::Write);
        assert!(is(stuck.queue, 1.0) && is(stuck.layer(Layer::Storage), 1.0), "{second}: {stuck:?}");
        assert_eq!(stuck.per_second, 0.0);
    }
    let before = page.read_at(700 * SECOND);
    let end = 700 * SECOND + 500 * MS;
    let spent =
        Spent { seen: 10 * SECOND, taken: 10 * SECOND, begun: 10 * SECOND + 250 * MS, ended: end, ..Spent::default() };
    page.page.ended(Kind::Write, slot, 512, Outcome::Done, &spent, end);
    page.page.publish_batch(end);
    let ended = between(&before, &page.read_at(701 * SECOND)).unwrap().kind(Kind::Write);
    assert!(is(ended.queue, 0.5) && is(ended.layer(Layer::Storage), 0.5), "half a second, not ten minutes: {ended:?}");
    assert!(is(ended.per_second, 1.0));
}

#[test]
fn a_request_that_a_reading_missed_is_never_more_than_one() {
    let room = tempfile::tempdir().unwrap();
    let mut page = written(&room);
    page.page.came(Kind::Read, SECOND, 0, 512);
    let mut missed = page.read_at(900 * SECOND);
    missed.in_flight.clear();
    let found = between(&missed, &page.read_at(901 * SECOND)).unwrap().kind(Kind::Read);
    assert!(is(found.queue, 1.0), "{found:?}");
    missed.read = 901 * SECOND;
    let lost = between(&page.read_at(900 * SECOND), &missed).unwrap();
    assert!(is(lost.kind(Kind::Read).queue, 0.0), "{lost:?}");
}

#[test]
fn a_restarted_page_has_no_rates() {
    let room = tempfile::tempdir().unwrap();
    let mut page = written(&room);
    page.ended(Kind::Read, 5, 512, MS);
    let before = page.read_at(SECOND);
    let mut other = page.read_at(2 * SECOND);
    other.created = before.created + 1;
    assert_eq!(between(&before, &other), None);
    assert_eq!(between(&before, &before.clone()), None, "no time has passed");
    assert_eq!(between(&page.read_at(2 * SECOND), &before), None, "time went back");
    // A writer may reset its counters without marking the page as another one.
    drop(page);
    std::fs::remove_file(room.path().join("a.page")).unwrap();
    let mut fewer = written(&room).read_at(2 * SECOND);
    fewer.created = before.created;
    assert_eq!(between(&before, &fewer), None);
}

#[test]
fn requests_of_a_killed_process_are_not_subtracted_from_the_next() {
    let room = tempfile::tempdir().unwrap();
    let mut page = written(&room);
    page.page.came(Kind::Read, SECOND, 0, 512);
    let before = page.read_at(100 * SECOND);
    assert_eq!(before.in_flight.len(), 1);
    drop(page.page);
    let next = Page::begin(open(&page.path), Source::Kernel, "{}").unwrap();
    let mut page = Written { path: page.path, page: next };
    page.page.came(Kind::Read, 100 * SECOND + 500 * MS, 0, 512);
    let now = page.read_at(101 * SECOND);
    assert_eq!(now.incarnation, before.incarnation + 1);
    let rates = between(&before, &now).unwrap().kind(Kind::Read);
    assert!(is(rates.queue, 0.5), "{rates:?}");
}

#[test]
fn rates_of_several_disks_add_up() {
    let room = tempfile::tempdir().unwrap();
    let mut page = written(&room);
    let before = page.read_at(SECOND);
    page.ended(Kind::Write, 10, 4096, 99 * MS);
    let one = between(&before, &page.read_at(2 * SECOND)).unwrap();
    let mut sum = one.clone();
    sum.add(&one);
    assert!(is(sum.all().per_second, 20.0) && is(sum.all().queue, 2.0) && is(sum.seconds, 1.0), "{sum:?}");
}
