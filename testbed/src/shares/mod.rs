//! `cargo xtask share-test`: repositories on real servers of NFS and SMB, in a guest that is both server and client.
//!
//! This module builds the guest and reports its claims; the tests are in `testbed/shares`. Nothing on the host is
//! changed and no root is needed. A failed run keeps its directory, with the console.

mod root;

use std::fs::{self, File};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::Command;

use control::in_full;

use crate::guest::{Guest, GuestError, Job, Line, at, distribution, kernel};
use crate::options::whole_path;
use crate::programs::{cargo, programs, root as top};
use crate::progress::Progress;
use crate::tool;

const SERVERS: [&str; 3] = ["nfs", "smb", "thin"];
const SCRIPTS: [&str; 5] = ["steps.sh", "server-nfs.sh", "server-smb.sh", "tests.sh", "thin.sh"];
/// The parts, as defined in `testbed/shares/tests.sh`.
const PARTS: [&str; 9] = ["life", "failures", "qcow2", "vhd", "leases", "described", "away", "full", "killed"];
const PROGRAMS: [&str; 4] = ["taplined", "tapline", "tapline-disk", "bench-guest"];

/// Modules of servers and clients, including those used by name without a dependency, and of a network of several
/// hosts.
const MODULES: &[&str] = &[
    "virtio_pci",
    "virtio_blk",
    "crc32c_generic",
    "crc32c_intel",
    "ext4",
    "veth",
    "nfsd",
    "nfsv3",
    "nfsv4",
    "md5",
    "sha256_generic",
    "sha512_generic",
    "hmac",
    "cmac",
    "ecb",
    "aes_generic",
    "ccm",
    "ghash_generic",
    "gcm",
    "ctr",
    "nls_utf8",
    "dm_mod",
    "dm_thin_pool",
    "cifs",
];

/// Size of the server's disk in MiB: images of 64 MiB, with snapshots and copies.
const SERVER_MIB: u64 = 640;

/// Timeout for a silent guest: the longest pause is a server that is away.
const SILENCE_SECONDS: u64 = 400;

/// Tests repositories on NFS and SMB servers, and disks on a full thin volume, in a guest
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Use taplined, tapline, tapline-disk and bench-guest in this directory instead of building them
    #[arg(long, value_name = "DIR", value_parser = whole_path)]
    bin_dir: Option<PathBuf>,
    /// Keep the directory of a successful run
    #[arg(long)]
    keep: bool,
    /// Only these parts; repeat for several
    #[arg(long = "part", value_name = "NAME", value_parser = PARTS, default_values = PARTS, hide_default_value = true)]
    parts: Vec<String>,
    /// The servers to test
    #[arg(value_parser = SERVERS, default_values = SERVERS)]
    servers: Vec<String>,
}

/// Runs the tests of each requested server in a guest of its own.
pub fn run(options: &Options) -> Result<(), String> {
    let progress = Progress::start();
    progress.step("the programs, a distribution and a guest");
    let programs = all_programs(options.bin_dir.as_deref())?;
    let told = |error: GuestError| in_full(&error);
    let cache = top().join("build").join("shares");
    let root = root::ROOT.obtain(&cache, &progress).map_err(told)?;
    let guest = Guest::build_of(kernel::SMALL, MODULES, &cache.join("guest"), &progress).map_err(told)?;
    let parts = options.parts.join(" ");
    for server in &options.servers {
        progress.step(&match server.as_str() {
            "thin" => "disks on a thin volume".to_owned(),
            server => format!("a repository on {server}"),
        });
        let work = top().join("build").join(format!("share-{server}-{}", std::process::id()));
        fs::create_dir_all(&work).map_err(|error| format!("{}: {error}", work.display()))?;
        let job = Job {
            name: "shares",
            script: distribution::TO_ROOT,
            parameters: vec![
                ("INIT", "/sbin/shares-init".to_owned()),
                ("SHARE", server.to_owned()),
                ("PARTS", parts.clone()),
            ],
        };
        let held = perform(&job, &guest, &root, &programs, &work, &progress);
        held.map_err(|error| format!("{}\nkept: {}", told(error), work.display()))?;
        if !options.keep {
            fs::remove_dir_all(&work).map_err(|error| format!("cannot remove {}: {error}", work.display()))?;
        }
    }
    progress.step("everything held");
    Ok(())
}

/// Boots the guest and reports its claims.
fn perform(
    job: &Job,
    guest: &Guest,
    root: &Path,
    programs: &Path,
    work: &Path,
    progress: &Progress,
) -> Result<(), GuestError> {
    let (given, disk) = (work.join("given.tar"), work.join("server.img"));
    pack(&given, programs, work)?;
    let made = File::create(&disk).and_then(|file| file.set_len(SERVER_MIB << 20));
    made.map_err(at("create", &disk))?;
    let running = guest.boot_with(job, work, |qemu| {
        // Writes to the root are discarded with the machine; the server's disk need not survive the host.
        for (image, more) in [(root, "snapshot=on"), (&given, "readonly=on"), (&disk, "cache=unsafe")] {
            qemu.arg("-drive").arg(format!("file={},format=raw,if=virtio,{more}", image.display()));
        }
    })?;
    let transcript = running.silent_for_at_most(SILENCE_SECONDS).follow(|line| {
        match line {
            Line::Said("held", claim) => progress.holds(claim),
            Line::Said("fail" | "end", _) => {}
            Line::Said("doing", what) => progress.detail(what),
            Line::Said(key, value) => progress.detail(&format!("{key}: {value}")),
            Line::Chatter(line) => progress.live(line),
        }
        Ok::<_, GuestError>(ControlFlow::Continue(()))
    })?;
    fs::remove_file(&disk).map_err(at("remove", &disk))?;
    transcript.value("held").map(drop)
}

/// The directory of the programs; if none is named, the programs of the disk tests are built as well.
fn all_programs(named: Option<&Path>) -> Result<PathBuf, String> {
    let directory = programs(named)?;
    if named.is_none() {
        let build = tool::run(cargo().args(["build", "--bin", "bench-guest"]));
        build.map_err(|error| in_full(&error))?;
    }
    Ok(directory)
}

/// Packs the scripts and programs into an archive. Symbols other than function names are stripped.
fn pack(archive: &Path, programs: &Path, work: &Path) -> Result<(), GuestError> {
    let given = work.join("given");
    fs::create_dir_all(&given).map_err(at("create", &given))?;
    for name in PROGRAMS {
        let mut strip = Command::new("objcopy");
        tool::text(strip.arg("--strip-debug").arg(programs.join(name)).arg(given.join(name)))?;
    }
    let scripts = SCRIPTS.map(|name| top().join("testbed/shares").join(name));
    tool::text(Command::new("cp").args(scripts).arg(&given))?;
    tool::text(
        Command::new("tar").args(["-c", "--owner=0", "--group=0", "-f"]).arg(archive).arg("-C").arg(&given).arg("."),
    )?;
    fs::remove_dir_all(&given).map_err(at("remove", &given))
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::options::parse;

    #[test]
    fn all_are_meant_unless_one_is_named() {
        let all: Options = parse(&[]).unwrap();
        assert_eq!((all.servers, all.parts), (SERVERS.map(str::to_owned).into(), PARTS.map(str::to_owned).into()));
        let options: Options = parse(&["smb", "--keep", "--part", "full"]).unwrap();
        assert_eq!((options.servers, options.parts, options.keep), (vec!["smb".into()], vec!["full".into()], true));
        for refused in [&["--part", "empty"][..], &["afp"], &["--bin-dir"]] {
            assert!(parse::<Options>(refused).is_err(), "{refused:?}");
        }
    }
}
