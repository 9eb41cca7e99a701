//! The rows, as data.

use super::Figure::{ClientCpu, HogCpu, Iops, IopsPerCpu, P50, ServerCpu, Waits};
use super::Threshold::{AtLeast, AtMost, No};
use super::{Figure, Image, Load, Row, RowServer, Storage, Target, Threshold};

const fn load(pattern: &'static str, block: u32, depth: u32) -> Load {
    Load { pattern, block, depth, spins: false, rate: None, cold: false, fresh: false, hogs: false }
}

const fn target(of: &'static str, figure: Figure, wanted: Threshold) -> Target {
    Target { of, figure, wanted }
}

const RAW: (&str, RowServer) = ("tapline raw", RowServer::Tapline(Image::Raw));
const VHD: (&str, RowServer) = ("tapline vhd", RowServer::Tapline(Image::Vhd));
const QEMU_VHD: (&str, RowServer) = ("tapline qemu's vhd", RowServer::Tapline(Image::QemuVhd));
const QCOW2: (&str, RowServer) = ("tapline qcow2", RowServer::Tapline(Image::Qcow2));
const QSD: (&str, RowServer) = ("QSD raw", RowServer::Qsd(Image::Raw));
const FIO: (&str, RowServer) = ("fio", RowServer::Fio);

const FORMATS: &[(&str, RowServer)] = &[
    RAW,
    VHD,
    QEMU_VHD,
    QCOW2,
    QSD,
    ("QSD vhd", RowServer::Qsd(Image::Vhd)),
    ("QSD qcow2", RowServer::Qsd(Image::Qcow2)),
];

const FORMAT_TARGETS: &[Target] = &[
    target("tapline vhd", Iops, AtLeast(0.95, "tapline raw")),
    target("tapline qemu's vhd", Iops, AtLeast(0.95, "tapline raw")),
    target("tapline qcow2", Iops, AtLeast(0.95, "tapline raw")),
];

const ON_DISK: &[(&str, RowServer)] = &[FIO, RAW, VHD, QCOW2, QSD];

const ON_DISK_TARGETS: &[Target] = &[
    target("tapline raw", Iops, AtLeast(0.97, "fio")),
    target("tapline vhd", Iops, AtLeast(0.97, "fio")),
    target("tapline qcow2", Iops, AtLeast(0.97, "fio")),
    target("tapline raw", Iops, AtLeast(1.2, "QSD raw")),
];

const POLLING: &[(&str, RowServer)] = &[
    ("off", RowServer::TaplineWith(Image::Raw, &["--polling", "off"])),
    ("adaptive", RowServer::TaplineWith(Image::Raw, &["--polling", "adaptive"])),
    ("on", RowServer::TaplineWith(Image::Raw, &["--polling", "on"])),
];

const CORES: &[(&str, RowServer)] = &[
    ("one thread", RowServer::TaplineWith(Image::Raw, &["--threads", "1", "--cpus", "0-1"])),
    ("two threads", RowServer::TaplineWith(Image::Raw, &["--threads", "2", "--cpus", "0-1"])),
];

pub(super) const ROWS: &[Row] = &[
    Row {
        name: "null",
        what: "no storage behind it, 4 KiB random read, depth 32",
        storage: Storage::Memory,
        load: load("randread", 4096, 32),
        who: &[("tapline null", RowServer::Tapline(Image::Null)), ("QSD null", RowServer::Qsd(Image::Null))],
        targets: &[target("tapline null", IopsPerCpu, AtLeast(1.6, "QSD null"))],
    },
    Row {
        name: "memory-read-32",
        what: "raw on tmpfs, Linux AIO, 4 KiB random read, depth 32",
        storage: Storage::Memory,
        load: load("randread", 4096, 32),
        who: &[FIO, RAW, QSD],
        targets: &[
            target("tapline raw", Iops, AtLeast(2.7, "QSD raw")),
            target("tapline raw", Iops, AtLeast(1.1, "fio")),
            target("tapline raw", Waits, No(0.05)),
            target("tapline raw", ClientCpu, No(1.2)),
        ],
    },
    Row {
        name: "memory-read-1",
        what: "raw on tmpfs, 4 KiB random read, depth 1, a client that sleeps",
        storage: Storage::Memory,
        load: load("randread", 4096, 1),
        who: &[RAW, QSD],
        targets: &[target("tapline raw", Iops, AtLeast(4.0, "QSD raw"))],
    },
    Row {
        name: "memory-spin-1",
        what: "raw on tmpfs, 4 KiB random read, depth 1, a client that spins",
        storage: Storage::Memory,
        load: Load { spins: true, ..load("randread", 4096, 1) },
        who: &[RAW, QSD],
        targets: &[target("tapline raw", Iops, AtLeast(3.0, "QSD raw"))],
    },
    Row {
        name: "memory-write-32",
        what: "raw on tmpfs, 4 KiB random write, depth 32",
        storage: Storage::Memory,
        load: load("randwrite", 4096, 32),
        who: &[FIO, RAW, QSD],
        targets: &[target("tapline raw", Iops, AtLeast(2.4, "QSD raw"))],
    },
    Row {
        name: "memory-read-64k",
        what: "raw on tmpfs, 64 KiB read, depth 16",
        storage: Storage::Memory,
        load: load("read", 65536, 16),
        who: &[FIO, RAW, QSD],
        targets: &[target("tapline raw", Iops, AtLeast(1.8, "QSD raw"))],
    },
    Row {
        name: "formats-read",
        what: "allocated images on tmpfs, 4 KiB random read, depth 32",
        storage: Storage::Memory,
        load: load("randread", 4096, 32),
        who: FORMATS,
        targets: FORMAT_TARGETS,
    },
    Row {
        name: "formats-write",
        what: "allocated images on tmpfs, 4 KiB random write, depth 32",
        storage: Storage::Memory,
        load: load("randwrite", 4096, 32),
        who: FORMATS,
        targets: FORMAT_TARGETS,
    },
    Row {
        name: "disk-read-32",
        what: "real storage, io_uring, 4 KiB random read, depth 32",
        storage: Storage::Disk,
        load: load("randread", 4096, 32),
        who: ON_DISK,
        targets: ON_DISK_TARGETS,
    },
    Row {
        name: "disk-write-32",
        what: "real storage, io_uring, 4 KiB random write, depth 32",
        storage: Storage::Disk,
        load: load("randwrite", 4096, 32),
        who: ON_DISK,
        targets: ON_DISK_TARGETS,
    },
    Row {
        name: "disk-read-64k",
        what: "real storage, io_uring, 64 KiB read, depth 16",
        storage: Storage::Disk,
        load: load("read", 65536, 16),
        who: &[FIO, RAW, QSD],
        targets: &[target("tapline raw", Iops, AtLeast(1.2, "QSD raw"))],
    },
    Row {
        name: "disk-cold-32",
        what: "real storage through a page cache that holds nothing of it, io_uring, 4 KiB random read, depth 32",
        storage: Storage::Disk,
        load: Load { cold: true, ..load("randread", 4096, 32) },
        who: &[RAW, QSD],
        targets: &[target("tapline raw", Iops, AtLeast(1.0, "QSD raw"))],
    },
    Row {
        name: "paced",
        what: "raw on tmpfs, 4 KiB random read, 5,000 a second, one at a time",
        storage: Storage::Memory,
        load: Load { rate: Some(5000), ..load("randread", 4096, 1) },
        who: &[RAW, QSD],
        targets: &[
            target("tapline raw", ServerCpu, AtMost(1.0, "QSD raw")),
            target("tapline raw", P50, AtMost(0.7, "QSD raw")),
        ],
    },
    Row {
        name: "nbd",
        what: "raw on tmpfs over NBD, 4 KiB random read, depth 32, fio as the client",
        storage: Storage::Memory,
        load: load("randread", 4096, 32),
        who: &[("tapline", RowServer::TaplineNbd), ("nbdkit", RowServer::Nbdkit), ("qemu-nbd", RowServer::QemuNbd)],
        targets: &[target("tapline", Iops, AtLeast(1.5, "nbdkit"))],
    },
    Row {
        name: "polling-1",
        what: "raw on tmpfs, 4 KiB read, depth 1, by polling",
        storage: Storage::Memory,
        load: load("read", 4096, 1),
        who: POLLING,
        targets: &[target("adaptive", Iops, AtLeast(1.5, "off")), target("adaptive", Iops, AtLeast(0.95, "on"))],
    },
    Row {
        name: "polling-1000",
        what: "raw on tmpfs, 4 KiB read, 1,000 a second, by polling",
        storage: Storage::Memory,
        load: Load { rate: Some(1000), ..load("read", 4096, 1) },
        who: POLLING,
        targets: &[target("adaptive", ServerCpu, AtMost(1.05, "off"))],
    },
    Row {
        name: "polling-hog",
        what: "raw on tmpfs, 4 KiB random read, depth 1, beside a process that wants all of each CPU, by polling",
        storage: Storage::Memory,
        load: Load { hogs: true, ..load("randread", 4096, 1) },
        who: POLLING,
        targets: &[target("adaptive", HogCpu, AtLeast(0.97, "off")), target("adaptive", Iops, AtLeast(1.0, "off"))],
    },
    Row {
        name: "cores",
        what: "raw on tmpfs, 4 KiB random read, depth 64, by threads of the disk; the client is on CPU 1 too",
        storage: Storage::Memory,
        load: load("randread", 4096, 64),
        who: CORES,
        targets: &[target("two threads", IopsPerCpu, AtLeast(0.85, "one thread"))],
    },
    Row {
        name: "chain-read-32",
        what: "30 layers of VHDs on tmpfs, scattered by 4 KiB, random read, depth 32",
        storage: Storage::Memory,
        load: load("randread", 4096, 32),
        who: &[VHD, ("tapline 30 layers", RowServer::Tapline(Image::ScatteredChain))],
        targets: &[target("tapline 30 layers", Iops, AtLeast(0.95, "tapline vhd"))],
    },
    Row {
        name: "disk-first-write",
        what: "a sparse raw image on real storage, io_uring, 4 KiB random first write, depth 32",
        storage: Storage::Disk,
        load: Load { fresh: true, ..load("randwrite", 4096, 32) },
        who: &[FIO, ("tapline raw", RowServer::Tapline(Image::Sparse)), ("QSD raw", RowServer::Qsd(Image::Sparse))],
        targets: &[target("tapline raw", Iops, AtLeast(1.0, "fio"))],
    },
];
