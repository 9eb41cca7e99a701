//! The formats of samples.

use std::path::PathBuf;

use stats::Kind;

use super::super::fixture::{MS, SECOND, Written};
use super::super::layers::{Device, DiskLayers};
use super::super::rates;
use super::super::rows::GroupBy;
use super::*;

/// A disk that did 100 reads of 512 KiB in two seconds, each of 10 ms, served to the guest at `at`.
fn sampled(room: &tempfile::TempDir, transport: &str, at: &str) -> (Vec<Row>, Pages) {
    let mut page = Written::at(room.path().join("a.page"), "raw:/images/a disk.raw");
    let before = page.read_at(SECOND);
    page.ended(Kind::Read, 100, 512 << 10, 9 * MS);
    let mut pages = Pages::new(Vec::new(), vec![page.path.clone()]);
    pages.round();
    let disk = pages.disks.get_mut(&page.path).unwrap();
    disk.rates = rates::between(&before, &page.read_at(3 * SECOND));
    disk.identity.transport = transport.into();
    disk.identity.at = at.into();
    let wanted = DiskSelection { words: Vec::new(), by: GroupBy::Disk };
    (wanted.rows(&pages, &Names::default()), pages)
}

#[test]
fn the_xsiostat_format_has_its_columns_units_and_widths() {
    let room = tempfile::tempdir().unwrap();
    let (rows, pages) = sampled(&room, "blkif", "7/xvdb");
    let expected = "----------------------------------------------------------------------
  DOM   VBD         r/s        w/s    rMB/s    wMB/s rAvgQs wAvgQs
    7,51728:      50.00       0.00    25.00     0.00   0.50   0.00

";
    assert_eq!(xsiostat(&rows, &pages), expected);
    for (transport, at) in [("vhost-user", "/run/7/xvdb"), ("blkif", "nonsense")] {
        let (rows, pages) = sampled(&tempfile::tempdir().unwrap(), transport, at);
        let text = xsiostat(&rows, &pages);
        assert!(text.contains("\n    -,a_disk.raw:      50.00 "), "no guest of Xen: {text}");
    }
}

#[test]
fn json_has_units_in_its_names_and_is_a_line() {
    let room = tempfile::tempdir().unwrap();
    let (rows, pages) = sampled(&room, "vhost-user", "vm.sock");
    let text = sample(&rows, &pages, &Layers::default()).to_string();
    assert!(!text.contains('\n'));
    let sample: Value = serde_json::from_str(&text).unwrap();
    let disk = &sample["disks"][0];
    assert_eq!(disk["name"], "a disk.raw");
    assert_eq!(disk["state"], "serving");
    for (field, right) in [
        ("interval_seconds", 2.0),
        ("reads_per_second", 50.0),
        ("writes_per_second", 0.0),
        ("read_bytes_per_second", 26_214_400.0),
        ("average_request_bytes", 524_288.0),
        ("queue_size", 0.5),
        ("queue_size_ring", 0.0),
        ("queue_size_tapline", 0.05),
        ("queue_size_storage", 0.45),
    ] {
        let value = disk[field].as_f64().unwrap_or(f64::NAN);
        assert!((value - right).abs() < 1e-9, "{field}: {value}");
    }
    let read = &disk["kinds"]["read"];
    assert_eq!((&read["count"], &read["bytes"]), (&json!(100), &json!(52_428_800)));
    assert_eq!(read["stages"]["storage"]["sum_ns"], json!(900 * MS));
    assert_eq!(disk["kinds"]["write_zeroes"]["count"], 0);
    assert_eq!(sample["not_read"], json!([]));
}

/// Layers with a known guest and a known device of the host.
fn known(row: &Row) -> Layers {
    let device = |count| {
        let reads = stats::Completed { count, ms: count, ..stats::Completed::default() };
        let counts = stats::DeviceCounts { reads, weighted_ms: count, ..stats::DeviceCounts::default() };
        Device::new("vda", counts, count * SECOND)
    };
    let reading = |count| {
        let around = DiskLayers { guest: Ok(device(count)), host: Ok(vec![device(count)]), shared_by: 2 };
        vec![(row.pages[0].clone(), around)]
    };
    Layers::of_known([reading(1), reading(3)])
}

#[test]
fn the_layers_around_a_disk_have_their_figures_or_say_why_not() {
    let room = tempfile::tempdir().unwrap();
    let (rows, pages) = sampled(&room, "vhost-user", "vm.sock");
    let disk = object(&rows[0], &pages, &known(&rows[0]));
    let guest = &disk["guest"];
    assert_eq!(
        (&guest["device"], &guest["reads_per_second"], &guest["completed"]),
        (&json!("vda"), &json!(1.0), &json!(3))
    );
    assert_eq!((&guest["average_latency_ns"], &guest["queue_size"]), (&json!(1e6), &json!(0.001)));
    assert_eq!((&guest["rate_times_latency"], &guest["queue_differs"]), (&json!(0.001), &json!(false)));
    assert_eq!((&disk["host"]["devices"][0], &disk["host"]["shared_by"]), (guest, &json!(2)));
    let asked = object(&rows[0], &pages, &Layers::default());
    assert_eq!(
        (&asked["guest"], &asked["host"]),
        (&json!({ "unknown": "not answered in time" }), &json!({ "unknown": "not answered in time" }))
    );
}

#[test]
fn each_field_of_a_disk_is_in_the_documentation() {
    let room = tempfile::tempdir().unwrap();
    let (rows, pages) = sampled(&room, "vhost-user", "vm.sock");
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../docs/statistics.md");
    let documented = std::fs::read_to_string(path).unwrap();
    let disk = object(&rows[0], &pages, &known(&rows[0]));
    let kind = disk["kinds"]["read"].as_object().unwrap();
    let fields = disk
        .as_object()
        .unwrap()
        .keys()
        .chain(kind.keys())
        .chain(["sum_ns", "unknown"].map(str::to_owned).iter())
        .chain(disk["host"].as_object().unwrap().keys())
        .chain(disk["guest"].as_object().unwrap().keys())
        .cloned()
        .collect::<Vec<_>>();
    let missing: Vec<&String> = fields.iter().filter(|field| !documented.contains(&format!("`{field}`"))).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

#[test]
fn the_table_has_all_columns() {
    let room = tempfile::tempdir().unwrap();
    let (rows, _pages) = sampled(&room, "vhost-user", "vm.sock");
    let text = table(&rows);
    assert!(text.contains("p99.9") && text.contains("a disk.raw ") && text.ends_with("\n\n"), "{text}");
}
