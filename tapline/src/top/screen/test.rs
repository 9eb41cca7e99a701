//! Compares the screen at several sizes with `screens.txt`, and tests the keys.
//!
//! `WRITE_SCREENS=1` rewrites the file, to be reviewed.

use std::collections::HashMap;
use std::fmt::Write;
use std::path::Path;

use ratatui::Terminal;
use ratatui::backend::TestBackend;
use stats::{Completed, DeviceCounts, Kind};
use uuid::Uuid;

use super::super::fixture::{MS, SECOND, Written};
use super::super::layers::{Device, DiskLayers};
use super::super::names::Name;
use super::super::rates;
use super::*;

const SCREENS: &str = include_str!("screens.txt");
const VBD: [&str; 2] = ["0000bd00-0000-4000-8000-000000000001", "0000bd00-0000-4000-8000-000000000002"];

/// Layers of two disks after a second: the busy disk has known ones; the guest of the stuck disk does not respond, and
/// its image is on tmpfs.
fn around(busy: &Path, stuck: &Path) -> Layers {
    let counts = |reads: u64, writes: u64, weighted_ms: u64| DeviceCounts {
        reads: Completed { count: reads, bytes: reads * 4096, ms: reads * 3 / 2, merged: 0 },
        writes: Completed { count: writes, bytes: writes * 65_536, ms: writes * 6, merged: 0 },
        weighted_ms,
        ..DeviceCounts::default()
    };
    let reading = |share: u64| {
        let guest = Device::new("vda", counts(2000 * share, 501 * share, 6006 * share), SECOND * share);
        let clock = 160 * SECOND + SECOND * share;
        let part = Device::new("nvme0n1p2", counts(2100 * share, 520 * share, 6270 * share), clock);
        // Its queue differs from rate times latency.
        let whole = Device::new("nvme0n1", counts(4000 * share, 520 * share, 20_000 * share), clock);
        let silent = Err("no tapline-guest answers in the guest".to_owned());
        vec![
            (busy.to_owned(), DiskLayers { guest: Ok(guest), host: Ok(vec![part, whole]), shared_by: 3 }),
            (stuck.to_owned(), DiskLayers { guest: silent, host: Err("tmpfs".into()), shared_by: 0 }),
        ]
    };
    Layers::of_known([reading(0), reading(1)])
}

/// Three disks: a busy one, a stuck one, and one without a daemon whose process has ended.
struct Host {
    room: tempfile::TempDir,
    pages: Pages,
    names: Names,
    layers: Layers,
    screen: Screen,
}

impl Host {
    fn new() -> Host {
        let room = tempfile::tempdir().unwrap();
        let at = |vbd: &str| room.path().join(vbd).join("statistics.page");
        let mut busy = Written::at(at(VBD[0]), "qcow2:/srv/vms/web-root.qcow2");
        let mut stuck = Written::at(at(VBD[1]), "vhd:/srv/vms/mail.vhd");
        let ended = Written::at(room.path().join("a.page"), "raw:/images/scratch.raw");
        let mut pages = Pages::new(vec![room.path().to_owned()], Vec::new());
        busy.ended(Kind::Write, 5, 65_536, 4 * MS);
        pages.round();
        // A first reading, so that the next one has rates.
        pages.disks.values_mut().for_each(|disk| drop(disk.latency().cloned()));
        pages.disks.values_mut().for_each(|disk| drop(disk.stages().cloned()));
        let before: Vec<_> = pages.disks.values().map(|disk| (disk.path.clone(), disk.now.clone())).collect();
        busy.ended(Kind::Read, 2000, 4096, MS / 4);
        busy.ended(Kind::Write, 500, 65_536, 4 * MS);
        busy.ended(Kind::Write, 1, 65_536, 80 * MS);
        let slot = stuck.page.came(Kind::Write, 100 * SECOND, 7 << 30, 4096);
        stuck.page.submitted(slot, 100 * SECOND + 2 * MS);
        stuck.page.came(Kind::Read, 160 * SECOND + 900 * MS, 4096, 512);
        let mut ended = ended;
        ended.page.leave();
        pages.round();
        for (path, mut before) in before {
            let disk = pages.disks.get_mut(&path).unwrap();
            before.read = 160 * SECOND;
            disk.now.read = 161 * SECOND;
            disk.now.pid = disk.now.pid.map(|_| 4711);
            disk.rates = rates::between(&before, &disk.now);
            disk.history = (0u32..40).map(|at| (f64::from(at * at), f64::from(at % 8))).collect();
        }
        // As if it was stuck in the reading before.
        let disk = pages.disks.get_mut(&stuck.path).unwrap();
        if let Some(rates) = &mut disk.rates {
            rates.kinds[Kind::Write as usize].queue = 1.0;
            rates.kinds[Kind::Write as usize].stages[4] = 1.0;
        }
        let name = |vm: &str, device: &str, vdi: &str| Name {
            vm: Some(vm.into()),
            device: device.into(),
            vdi: vdi.into(),
            vdi_uuid: Uuid::nil(),
            sr: "fast".into(),
            health: Default::default(),
        };
        let known =
            [name("web", "vda", "web-root"), name("a mail server with a long name", "vdb", "all mail since 1998")];
        let known: HashMap<Uuid, Name> = VBD.iter().map(|vbd| Uuid::parse_str(vbd).unwrap()).zip(known).collect();
        let wanted = DiskSelection { words: Vec::new(), by: GroupBy::Disk };
        let screen = Screen::new(wanted, Duration::from_secs(1), 0, true);
        let layers = around(&busy.path, &stuck.path);
        Host { room, pages, names: Names::of_known(known), layers, screen }
    }

    fn draw(&mut self, width: u16, height: u16) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| self.screen.draw(frame, &mut self.pages, &self.names, &self.layers)).unwrap();
        let buffer = terminal.backend().buffer();
        let line = |y| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>();
        let place = self.room.path().display().to_string();
        (0..height).map(line).map(|line| line.replace(&place, "/run/tapline/vbd").trim_end().to_owned()).collect()
    }

    fn keys(&mut self, keys: &str) {
        self.draw(120, 30);
        for char in keys.chars() {
            let code = match char {
                '\n' => KeyCode::Enter,
                '\u{1b}' => KeyCode::Esc,
                'D' => KeyCode::Down,
                char => KeyCode::Char(char),
            };
            assert_eq!(self.screen.key(KeyEvent::from(code)), KeyResult::Draw, "{char:?}");
            self.draw(120, 30);
        }
    }
}

#[test]
fn screens_match_the_file_at_each_width() {
    let mut now = String::new();
    for (what, keys, sizes) in [
        ("all disks", "", &[(60, 8), (80, 8), (120, 8), (200, 8)][..]),
        ("sums of VMs, by w/s", "b>>>>", &[(60, 8)]),
        ("a busy disk", "DD\n", &[(60, 48), (80, 48), (120, 48)]),
        ("a disk with a request that is stuck", "\n", &[(60, 46)]),
        ("a disk that has ended", "D\n", &[(60, 24)]),
        ("help", "?", &[(60, 32)]),
    ] {
        for (width, height) in sizes {
            let mut host = Host::new();
            host.keys(keys);
            writeln!(now, "==== {what}, {width} columns").unwrap();
            for line in host.draw(*width, *height) {
                writeln!(now, "{line}").unwrap();
            }
        }
    }
    if std::env::var_os("WRITE_SCREENS").is_some() {
        std::fs::write(Path::new(env!("CARGO_MANIFEST_DIR")).join("src/top/screen/screens.txt"), &now).unwrap();
        return;
    }
    let differs = now.lines().zip(SCREENS.lines()).find(|(now, listed)| now != listed);
    assert!(now == SCREENS, "{differs:?}\nreview the difference: WRITE_SCREENS=1 cargo test -p tapline screens");
}

#[test]
fn a_message_is_shown_in_a_terminal_that_is_too_small() {
    let mut host = Host::new();
    for (width, height) in [(59, 40), (200, 7), (20, 4)] {
        let text = host.draw(width, height).join(" ");
        assert!(text.contains("too small"), "{width}x{height}: {text}");
    }
    assert!(!host.draw(60, 8).join(" ").contains("too small"));
    for (width, height) in [(1, 1), (2, 1), (1, 9)] {
        host.draw(width, height);
    }
}

#[test]
fn a_filter_keeps_matching_rows_and_escape_removes_it() {
    let mut host = Host::new();
    let count = |host: &mut Host, text: &str| host.draw(120, 10).iter().filter(|line| line.contains(text)).count();
    host.keys("/MAIL\n");
    assert_eq!((count(&mut host, "mail server"), count(&mut host, "web/vda")), (1, 0));
    assert!(host.draw(120, 10)[0].contains("1 of 3 disks") && host.draw(120, 10)[0].contains("filter: MAIL"));
    host.keys("/ and nothing else\n");
    assert_eq!(count(&mut host, "No disk matches"), 1);
    host.keys("\u{1b}");
    assert_eq!(count(&mut host, "web/vda"), 1);
}

#[test]
fn enter_leads_from_a_vm_to_its_disks_and_from_a_disk_to_its_stages() {
    let mut host = Host::new();
    host.keys("b");
    assert!(host.draw(120, 10)[0].contains("3 VMs"));
    // The sum of disks without a VM is the first.
    host.keys("DD\n");
    let lines = host.draw(120, 10);
    assert!(lines[0].contains("1 of 3 disks") && lines[2].contains("web/vda"), "{lines:#?}");
    host.keys("\n");
    assert!(host.draw(120, 40).iter().any(|line| line.starts_with("STAGE")));
    host.keys("t");
    assert!(host.draw(120, 40).iter().any(|line| line.contains("since the page was begun")));
    host.keys("\u{1b}");
    assert!(host.draw(120, 40)[1].starts_with("DISK"));
}

#[test]
fn a_selected_row_stays_selected_until_its_disk_disappears() {
    let mut host = Host::new();
    host.keys("DDr");
    let row = host.screen.shown[host.screen.at].name.clone();
    assert_eq!(row, "web/vda");
    host.keys("\n");
    host.pages.disks.clear();
    assert!(host.draw(120, 10)[0].contains("0 disks"));
    assert!(host.draw(200, 10).iter().any(|line| line.contains("no disk is served here")));
}

#[test]
fn q_and_control_c_quit_but_a_q_in_a_filter_does_not() {
    let mut host = Host::new();
    host.keys("/q");
    let control_c = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
    assert_eq!(host.screen.key(control_c), KeyResult::Quit);
    host.keys("\n");
    assert_eq!(host.screen.key(KeyEvent::from(KeyCode::Char('q'))), KeyResult::Quit);
    host.keys(" ");
    assert!(host.screen.is_frozen() && host.draw(120, 10)[0].contains("FROZEN"));
}

#[test]
fn without_colours_what_is_old_is_bold_and_has_a_mark() {
    for colour in [true, false] {
        let mut host = Host::new();
        host.screen.colour = colour;
        let mut terminal = Terminal::new(TestBackend::new(120, 10)).unwrap();
        terminal.draw(|frame| host.screen.draw(frame, &mut host.pages, &host.names, &host.layers)).unwrap();
        let cells = terminal.backend().buffer().content();
        let mark = cells.iter().find(|cell| cell.symbol() == "!").unwrap();
        assert!(mark.modifier.contains(Modifier::BOLD));
        assert_eq!(cells.iter().all(|cell| cell.fg == Color::Reset), !colour);
    }
}
