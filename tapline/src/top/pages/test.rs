//! Pages that are bad, that end, and that come.

use std::fs;
use std::time::Duration;

use ratatui::Terminal;
use ratatui::backend::TestBackend;
use stats::{Kind, Page, Source};

use super::super::Wanted;
use super::super::fixture::{MS, Written, open};
use super::super::layers::Layers;
use super::super::names::Names;
use super::super::rows::By;
use super::super::screen::Screen;
use super::*;

struct Room(tempfile::TempDir);

impl Room {
    fn new() -> Room {
        Room(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn pages(&self) -> Pages {
        Pages::new(directories(Some(self.0.path()), self.0.path()), Vec::new())
    }

    fn page(&self, name: &str) -> Written {
        Written::at(self.path(name), &format!("raw:{name}"))
    }
}

/// The next round lists the directories again.
fn listed_round(pages: &mut Pages) {
    pages.listed = None;
    pages.round();
}

#[test]
fn pages_of_a_daemon_and_pages_without_one_are_found() {
    let room = Room::new();
    let vbd = "0000bd00-0000-4000-8000-000000000001";
    let kept = ["a.page", &format!("vbd/{vbd}/statistics.page"), "stats/b.page"].map(|name: &str| room.page(name));
    fs::create_dir(room.path("vbd/empty")).unwrap();
    let mut pages = room.pages();
    pages.round();
    assert_eq!(pages.disks.len(), kept.len());
    let of_daemon = &pages.disks[&kept[1].path];
    assert_eq!(of_daemon.vbd, Some(Uuid::parse_str(vbd).unwrap()));
    assert_eq!(of_daemon.identity.image, format!("raw:vbd/{vbd}/statistics.page"));
    assert!(pages.disks[&kept[0].path].vbd.is_none() && pages.unread.is_empty(), "{:?}", pages.unread);
}

#[test]
fn pages_that_cannot_be_read_are_named_and_the_others_go_on() {
    let room = Room::new();
    let mut good = room.page("good.page");
    drop(room.page("newer.page"));
    let file = open(&room.path("newer.page"));
    std::os::unix::fs::FileExt::write_all_at(&file, &99u64.to_ne_bytes(), 8).unwrap();
    fs::write(room.path("rubbish.page"), [7; 9000]).unwrap();
    fs::write(room.path("short.page"), b"TAPSTATS").unwrap();
    fs::write(room.path("just-made.page"), b"").unwrap();
    fs::write(room.path("just-sized.page"), [0; 9000]).unwrap();
    fs::create_dir(room.path("directory.page")).unwrap();
    rustix::fs::mknodat(
        rustix::fs::CWD,
        room.path("fifo.page"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::from_raw_mode(0o600),
        0,
    )
    .unwrap();
    let mut pages = room.pages();
    pages.round();
    good.ended(Kind::Read, 3, 512, MS);
    pages.round();
    assert!(pages.disks[&good.path].rates.as_ref().unwrap().kind(Kind::Read).ended == 3.0);
    let why = |name: &str| pages.unread.get(&room.path(name)).map_or("", |unread| &unread.why);
    assert!(
        why("newer.page").contains("of version 99") && why("newer.page").contains("use the tapline of that version")
    );
    assert!(why("rubbish.page").contains("not a statistics page"), "{}", why("rubbish.page"));
    assert!(why("short.page").contains("not a statistics page"), "{}", why("short.page"));
    assert!(why("fifo.page").contains("not a regular file") && why("directory.page").contains("not a regular file"));
    assert_eq!(pages.unread.len(), 5, "{:?}", pages.unread);
}

#[test]
fn a_page_that_is_cut_while_it_is_read_ends_its_row() {
    let room = Room::new();
    let page = room.page("a.page");
    let mut pages = room.pages();
    pages.round();
    open(&page.path).set_len(100).unwrap();
    pages.round();
    assert!(pages.disks[&page.path].ended.is_some() && pages.disks[&page.path].rates.is_none());
    assert!(pages.unread.contains_key(&page.path));
}

#[test]
fn a_disk_that_ended_is_shown_for_a_while_and_then_gone() {
    let room = Room::new();
    let mut page = room.page("a.page");
    let mut pages = room.pages();
    pages.round();
    assert!(pages.disks[&page.path].ended.is_none());
    page.page.leave();
    pages.round();
    assert!(pages.disks[&page.path].ended.is_some(), "it is shown as ended");
    let earlier = Instant::now().checked_sub(ENDED + Duration::from_secs(1)).unwrap();
    pages.disks.get_mut(&page.path).unwrap().ended = Some(earlier);
    listed_round(&mut pages);
    assert!(pages.disks.is_empty(), "its file is left, but it is not listed again");
    let mut named = Pages::new(Vec::new(), vec![page.path.clone()]);
    named.round();
    assert!(named.disks[&page.path].ended.is_some(), "one that is named is shown");
}

#[test]
fn a_page_that_is_removed_or_replaced_by_another_is_noticed() {
    let room = Room::new();
    let page = room.page("a.page");
    let mut pages = room.pages();
    pages.round();
    fs::remove_file(&page.path).unwrap();
    listed_round(&mut pages);
    assert!(pages.disks[&page.path].ended.is_some());
    let next = room.page("a.page");
    listed_round(&mut pages);
    assert!(pages.disks[&next.path].ended.is_none() && pages.disks[&next.path].rates.is_none());
}

#[test]
fn a_process_that_goes_on_in_a_page_takes_its_row_over() {
    let room = Room::new();
    let mut page = room.page("a.page");
    let mut pages = room.pages();
    pages.round();
    page.page.leave();
    pages.round();
    let _next = Page::begin(open(&page.path), Source::Kernel, r#"{"image":"qcow2:b"}"#).unwrap();
    pages.round();
    let disk = &pages.disks[&page.path];
    assert!(disk.ended.is_none() && disk.identity.image == "qcow2:b", "{disk:?}");
}

#[test]
fn histograms_are_of_the_last_interval_and_only_if_they_were_asked_for_before() {
    let room = Room::new();
    let mut page = room.page("a.page");
    page.ended(Kind::Read, 100, 512, MS);
    let mut pages = room.pages();
    pages.round();
    assert!(pages.disks.get_mut(&page.path).unwrap().latency().is_none());
    page.ended(Kind::Write, 3, 512, 99 * MS);
    pages.round();
    let latency = pages.disks.get_mut(&page.path).unwrap().latency().unwrap();
    assert_eq!(latency.count(), 3);
    assert!(latency.quantile(0.5).unwrap().abs_diff(100 * MS) * 1000 <= 100 * MS);
    pages.round();
    pages.round();
    assert!(pages.disks.get_mut(&page.path).unwrap().latency().is_none(), "that would be two intervals");
}

/// How much CPU time a round of 1,000 pages takes, printed for people: no test may depend on speed.
#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_thousand_pages_are_read_in_each_round() {
    let room = Room::new();
    raise_file_limit();
    let mut written: Vec<Written> = (0..1000).map(|number| room.page(&format!("{number}.page"))).collect();
    let mut pages = room.pages();
    pages.round();
    assert_eq!(pages.disks.len(), 1000, "{:?}", pages.unread);
    written.iter_mut().for_each(|page| page.ended(Kind::Read, 1, 4096, MS));
    let cpu = || rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    let ns = |time: rustix::time::Timespec| time.tv_sec * 1_000_000_000 + time.tv_nsec;
    let measure = |pages: &mut Pages, is_listed: bool, with_latency: usize| {
        let before = ns(cpu());
        for _ in 0..20 {
            pages.listed = (!is_listed).then(Instant::now);
            pages.round();
            pages.disks.values_mut().take(with_latency).for_each(|disk| drop(disk.latency().cloned()));
        }
        (ns(cpu()) - before) / 20 / 1000
    };
    let (plain, listed, shown) =
        (measure(&mut pages, false, 0), measure(&mut pages, true, 0), measure(&mut pages, false, 50));
    let wanted = Wanted { words: Vec::new(), by: By::Disk };
    let mut screen = Screen::new(wanted, Duration::from_secs(1), 0, true);
    let mut terminal = Terminal::new(TestBackend::new(200, 50)).unwrap();
    let names = Names::default();
    let before = ns(cpu());
    for _ in 0..20 {
        pages.listed = Some(Instant::now());
        pages.round();
        terminal.draw(|frame| screen.draw(frame, &mut pages, &names, &Layers::default())).unwrap();
    }
    let drawn = (ns(cpu()) - before) / 20 / 1000;
    eprintln!(
        "1,000 pages, CPU time a round: {plain} µs; with listing, each third round, {listed} µs; with 50 histograms \
         {shown} µs; with a screen of 200x50 {drawn} µs"
    );
    assert_eq!(pages.disks.len(), 1000);
}
