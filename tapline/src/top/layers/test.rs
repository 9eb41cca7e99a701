//! Tests of guests run by other programs, and of the host's devices.

use stats::DeviceLine;

use super::*;

const LINE: &str = "254 0 vda 1 2 3 4 5 6 7 8 9 10 11";

fn guest(serials: &[&str]) -> Result<GuestAnswer, String> {
    let disk = |serial: &&str| ((*serial).to_owned(), DeviceLine::parse(LINE).unwrap());
    Ok(GuestAnswer { uptime_ns: 7, disks: serials.iter().map(disk).collect() })
}

#[test]
fn a_guest_of_another_program_is_found_by_a_unique_serial_number() {
    let why = |guests: &[Result<GuestAnswer, String>], serial| find(guests, serial).unwrap_err();
    let found = find(&[guest(&["a"]), guest(&["b"]), Err("silent".into())], Some("b")).unwrap();
    assert_eq!((found.name.as_str(), found.clock_ns), ("vda", 7));
    assert!(why(&[], Some("a")).contains("--guest"));
    assert!(why(&[guest(&["a"])], None).contains("does not know it"));
    assert_eq!(why(&[guest(&["a"]), Err("silent".into())], Some("b")), "silent");
    assert!(why(&[guest(&["a"])], Some("b")).contains("no disk"));
    assert!(why(&[guest(&["a", "a"])], Some("a")).contains("several disks"));
    assert!(why(&[guest(&["a"]), guest(&["a"])], Some("a")).contains("several guests"));
}

#[test]
fn rates_use_the_devices_clock_and_need_an_unbroken_count() {
    let counts = |count| {
        let reads = Completed { count, ms: count, ..Completed::default() };
        DeviceCounts { reads, weighted_ms: count, ..DeviceCounts::default() }
    };
    let before = Device::new("vda", counts(10), 1_000_000_000);
    let rates = |name, count, clock_ns| {
        let mut now = Device::new(name, counts(count), clock_ns);
        now.follow(&before);
        now.rates.map(|rates| rates.reads)
    };
    assert_eq!(rates("vda", 20, 3_000_000_000), Some(5.0));
    assert_eq!(rates("vdb", 20, 3_000_000_000), None);
    assert_eq!(rates("vda", 5, 3_000_000_000), None, "the guest was started again");
    assert_eq!(rates("vda", 20, 500_000_000), None, "its clock went back");
}

#[test]
fn the_reply_has_a_reason_for_each_unknown_layer() {
    let room = tempfile::tempdir().unwrap();
    let image = room.path().join("a.raw");
    std::fs::write(&image, "").unwrap();
    let mut reader = LayerReader::new(None, &[room.path().join("no-such-socket")]);
    let page = PathBuf::from("a.page");
    let question = LayerRequest {
        images: vec![(page.clone(), image.clone()), ("b.page".into(), image), ("c.page".into(), "/proc/self".into())],
        wanted: vec![(page, None, Some("a".into())), ("c.page".into(), Some(Uuid::nil()), None)],
    };
    let answer = reader.read(&question);
    let [(_, first), (_, other)] = answer.as_slice() else { panic!("{answer:?}") };
    assert!(first.guest.as_ref().unwrap_err().contains("no-such-socket"), "{first:?}");
    // The tests' file system may have no device.
    assert_eq!(first.shared_by, if first.host.is_ok() { 2 } else { 0 }, "{first:?}");
    assert!(other.guest.as_ref().unwrap_err().contains("by a serial number"), "{other:?}");
    assert_eq!(other.host, Err("proc".into()));
    let answer = LayerReader::new(None, &[]).read(&question);
    assert_eq!(answer[1].1.guest, Err("the daemon does not say".into()));
}
