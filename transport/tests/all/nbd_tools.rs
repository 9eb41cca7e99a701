//! The server with the common NBD tools.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;

use disk::{Geometry, Operation};
use serde_json::Value;

use crate::nbd_support::{GEOMETRY, Served, output, run};

const LIBNBD: &str = "libnbd-bin";
const QEMU: &str = "qemu-utils";

fn nbdinfo(arguments: &[&str]) -> Value {
    serde_json::from_str(&run(LIBNBD, "nbdinfo", arguments)).unwrap()
}

fn qemu_io(served: &Served, commands: &[&str]) -> String {
    let uri = served.uri();
    // By default, qemu-io makes every write durable.
    let mut arguments = vec!["-f", "raw", "-t", "writeback", "-d", "unmap"];
    commands.iter().for_each(|command| arguments.extend(["-c", command]));
    arguments.push(&uri);
    run(QEMU, "qemu-io", &arguments)
}

/// A file of the disk's size with two regions of data.
fn source(served: &Served) -> String {
    let path = served.file("source.raw");
    let file = fs::File::create(&path).unwrap();
    file.set_len(GEOMETRY.len).unwrap();
    let island: Vec<u8> = (0..3 << 20).map(|at: u32| at.wrapping_mul(2654435761).to_be_bytes()[0]).collect();
    file.write_all_at(&island, 1 << 20).unwrap();
    file.write_all_at(&island, GEOMETRY.len - u64::try_from(island.len()).unwrap()).unwrap();
    path.to_str().unwrap().to_owned()
}

fn same_bytes(a: &str, b: &str) -> bool {
    fs::read(Path::new(a)).unwrap() == fs::read(Path::new(b)).unwrap()
}

#[test]
fn nbdinfo_shows_the_capabilities_of_the_export() {
    let served = Served::unix(GEOMETRY);
    let info = nbdinfo(&["--json", &served.uri()]);
    assert_eq!(info["protocol"], "newstyle-fixed");
    assert_eq!(info["structured"], true);
    let export = &info["exports"][0];
    assert_eq!(export["export-size"], GEOMETRY.len);
    let cans =
        ["can_flush", "can_fua", "can_multi_conn", "can_trim", "can_zero", "can_fast_zero", "can_cache", "can_df"];
    for can in cans {
        assert_eq!(export[can], true, "{can}");
    }
    assert_eq!(export["is_read_only"], false);
    assert_eq!(export["block_size_minimum"], 512);
    assert_eq!(export["block_size_preferred"], 4096);
    assert_eq!(export["block_size_maximum"], 32 << 20);
    assert_eq!(export["contexts"], serde_json::json!(["base:allocation"]));
}

#[test]
fn nbdinfo_lists_the_export_with_its_description() {
    let served = Served::tcp(GEOMETRY);
    let list = nbdinfo(&["--list", "--json", &served.uri()]);
    assert_eq!(list["exports"][0]["export-name"], "vdi");
    assert_eq!(list["exports"][0]["description"], "a disk in memory");
}

#[test]
fn nbdinfo_maps_data_and_holes() {
    let served = Served::unix(GEOMETRY);
    qemu_io(&served, &["write -P 7 1M 128k"]);
    let map = nbdinfo(&["--map", "--json", &served.uri()]);
    let runs: Vec<_> =
        map.as_array().unwrap().iter().map(|run| (run["offset"].as_u64(), run["type"].as_u64())).collect();
    assert_eq!(runs, [(Some(0), Some(3)), (Some(1 << 20), Some(0)), (Some((1 << 20) + (128 << 10)), Some(3))]);
}

#[test]
fn nbdcopy_writes_and_reads_back_the_same_bytes() {
    let served = Served::unix(GEOMETRY);
    let source = source(&served);
    let fetched = served.file("fetched.raw");
    run(LIBNBD, "nbdcopy", &["--flush", &source, &served.uri()]);
    run(LIBNBD, "nbdcopy", &[&served.uri(), fetched.to_str().unwrap()]);
    assert!(same_bytes(&source, fetched.to_str().unwrap()));
    let disk = served.disk.lock().unwrap();
    assert!(disk.done.iter().any(|(operation, _)| *operation == Operation::Flush));
}

#[test]
fn nbdcopy_over_tcp_with_many_connections_copies_the_same_bytes() {
    let served = Served::tcp(GEOMETRY);
    let source = source(&served);
    let fetched = served.file("fetched.raw");
    run(LIBNBD, "nbdcopy", &["--connections=8", "--threads=4", &source, &served.uri()]);
    run(LIBNBD, "nbdcopy", &["--connections=8", "--threads=4", &served.uri(), fetched.to_str().unwrap()]);
    assert!(same_bytes(&source, fetched.to_str().unwrap()));
}

#[test]
fn qemu_io_reads_what_it_wrote() {
    let served = Served::unix(GEOMETRY);
    qemu_io(&served, &["write -P 0xa5 64k 192k", "write -P 0x5a 512 512", "flush"]);
    qemu_io(&served, &["read -P 0xa5 64k 192k", "read -P 0x5a 512 512", "read -P 0 0 512"]);
}

#[test]
fn qemu_io_writes_the_largest_request() {
    let served = Served::unix(GEOMETRY);
    qemu_io(&served, &["write -P 9 0 32M", "read -P 9 0 32M", "write -P 8 4M 40M", "read -P 8 4M 40M"]);
}

#[test]
fn qemu_io_discards_and_zeroes() {
    let served = Served::unix(GEOMETRY);
    qemu_io(&served, &["write -P 1 0 4M", "discard 0 1M", "write -z -u 1M 1M", "write -z 2M 4k", "read -P 0 1M 1028k"]);
    let disk = served.disk.lock().unwrap();
    let did = |wanted| disk.done.iter().any(|(operation, _)| *operation == wanted);
    assert!(did(Operation::Discard));
    assert!(did(Operation::WriteZeroes { free: true, durable: false }));
    assert!(did(Operation::WriteZeroes { free: false, durable: false }));
}

#[test]
fn fua_becomes_a_durable_write() {
    let served = Served::unix(GEOMETRY);
    qemu_io(&served, &["write -f -P 3 0 4k", "write -z -f 4k 4k"]);
    let disk = served.disk.lock().unwrap();
    let did = |wanted| disk.done.iter().any(|(operation, _)| *operation == wanted);
    assert!(did(Operation::Write { durable: true }));
    assert!(did(Operation::WriteZeroes { free: false, durable: true }));
}

#[test]
fn a_read_only_export_refuses_writes_of_qemu_io() {
    let served = Served::unix(Geometry { read_only: true, ..GEOMETRY });
    run(QEMU, "qemu-io", &["-r", "-f", "raw", "-c", "read -P 0 0 4k", &served.uri()]);
    let refused = output(QEMU, "qemu-io", &["-f", "raw", "-c", "write 0 4k", &served.uri()]);
    assert!(!refused.status.success());
    assert_eq!(nbdinfo(&["--json", &served.uri()])["exports"][0]["is_read_only"], true);
}

#[test]
fn a_disk_with_blocks_of_4096_works() {
    let served = Served::unix(Geometry { block: 4096, ..GEOMETRY });
    assert_eq!(nbdinfo(&["--json", &served.uri()])["exports"][0]["block_size_minimum"], 4096);
    // QEMU does read-modify-write for accesses smaller than the block size that we announce.
    qemu_io(&served, &["write -P 2 512 512", "read -P 2 512 512", "read -P 0 0 512"]);
}

#[test]
fn qemu_img_converts_compares_and_maps() {
    let served = Served::unix(GEOMETRY);
    let source = source(&served);
    let fetched = served.file("fetched.raw");
    let uri = served.uri();
    run(QEMU, "qemu-img", &["convert", "-n", "-f", "raw", "-O", "raw", &source, &uri]);
    run(QEMU, "qemu-img", &["compare", "-f", "raw", "-F", "raw", &source, &uri]);
    run(QEMU, "qemu-img", &["convert", "-f", "raw", "-O", "raw", &uri, fetched.to_str().unwrap()]);
    assert!(same_bytes(&source, fetched.to_str().unwrap()));
    let map: Value =
        serde_json::from_str(&run(QEMU, "qemu-img", &["map", "--output=json", "-f", "raw", &uri])).unwrap();
    let data: u64 = map
        .as_array()
        .unwrap()
        .iter()
        .filter(|run| run["data"] == true)
        .map(|run| run["length"].as_u64().unwrap())
        .sum();
    assert_eq!(data, 6 << 20);
}

#[test]
fn fio_verifies_what_it_wrote() {
    let served = Served::unix(GEOMETRY);
    let uri = format!("--uri={}", served.uri());
    let job = [
        "--name=verify",
        "--ioengine=nbd",
        &uri,
        "--rw=randrw",
        "--bsrange=512-256k",
        "--blockalign=512",
        "--iodepth=32",
        "--size=64M",
        "--io_size=64M",
        "--verify=crc32c",
        "--do_verify=1",
        "--fsync=64",
        "--trim_percentage=5",
        "--randseed=7",
        "--output-format=json",
        "--verify_fatal=1",
    ];
    let printed = run("fio", "fio", &job);
    // fio's engine prints that it has connected before its report.
    let report: Value = serde_json::from_str(&printed[printed.find('{').unwrap()..]).unwrap();
    assert_eq!(report["jobs"][0]["error"], 0);
    assert!(report["jobs"][0]["read"]["total_ios"].as_u64().unwrap() > 0);
}
