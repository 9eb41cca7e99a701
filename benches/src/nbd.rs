//! `cargo xtask bench nbd`: whole disks copied over NBD, by Tapline and its peers.
//!
//! A sparse raw image in a tmpfs is read from each server by nbdcopy, in the clear and over TLS, and from qemu-nbd into
//! a file by `tapline image convert` and by nbdcopy. Servers and clients alternate; medians of seconds, and ratios to
//! Tapline's. Requests of 4 KiB are a row of `bench targets`.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use testbed::figures::median;
use testbed::options::{positive, whole_path};
use testbed::programs::build_released;
use testkit::certificates::Authority;

use crate::server::{Server, remove};
use crate::{in_turns, program};

/// Options of the benchmark.
#[derive(Debug, clap::Args)]
pub struct Options {
    #[arg(long, default_value_t = 5, value_parser = positive)]
    rounds: usize,
    /// Size of the disk in MiB
    #[arg(long = "size", value_name = "MIB", default_value_t = 10_240)]
    mib: u64,
    /// One MiB in N has data; the rest are holes
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..))]
    sparse: u64,
    /// Directory for the images: a tmpfs
    #[arg(long, default_value = "/dev/shm", value_parser = whole_path)]
    dir: PathBuf,
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Peer {
    Tapline,
    Nbdkit,
    QemuNbd,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Client {
    /// nbdcopy, which throws the data away.
    NbdcopyToNull,
    NbdcopyToFile,
    Convert,
}

/// Pairs of server and client that are compared; the first is Tapline's.
struct Row {
    name: &'static str,
    what: &'static str,
    is_tls: bool,
    pairs: &'static [(&'static str, Peer, Client)],
    /// How many times as fast as each of the others Tapline shall be.
    target: Option<f64>,
}

const SERVERS: &[(&str, Peer, Client)] = &[
    ("tapline", Peer::Tapline, Client::NbdcopyToNull),
    ("nbdkit", Peer::Nbdkit, Client::NbdcopyToNull),
    ("qemu-nbd", Peer::QemuNbd, Client::NbdcopyToNull),
];

const ROWS: &[Row] = &[
    Row { name: "read", what: "server, read by nbdcopy", is_tls: false, pairs: SERVERS, target: None },
    Row { name: "read-tls", what: "server, read by nbdcopy over TLS", is_tls: true, pairs: SERVERS, target: Some(1.2) },
    Row {
        name: "client",
        what: "client, which copies from qemu-nbd to a file",
        is_tls: false,
        pairs: &[
            ("tapline image convert", Peer::QemuNbd, Client::Convert),
            ("nbdcopy", Peer::QemuNbd, Client::NbdcopyToFile),
        ],
        target: Some(0.9),
    },
];

/// The image, the certificates, and the directory of sockets and copies.
struct Place {
    directory: tempfile::TempDir,
    server_certificates: PathBuf,
    client_certificates: PathBuf,
}

/// Measures all rows.
pub fn run(options: &Options) -> Result<(), String> {
    build_released(&["tapline-disk"])?;
    let place = Place::new(options)?;
    let mut report = Vec::new();
    for row in ROWS {
        let names: Vec<&str> = row.pairs.iter().map(|(name, ..)| *name).collect();
        let samples = in_turns(row.name, &names, options.rounds, |which| {
            let (_, server, client) = row.pairs[which];
            place.copy(server, client, row.is_tls)
        })?;
        let seconds: Vec<f64> = samples.iter().map(|samples| median(samples.iter().copied())).collect();
        if !options.json {
            print(row, options, &seconds);
        }
        for (name, took) in names.iter().zip(&seconds) {
            report.push(serde_json::json!({
                "row": row.name, "name": name, "seconds": took, "ratio": took / seconds[0], "target": row.target,
            }));
        }
    }
    if options.json {
        println!("{}", serde_json::Value::Array(report));
    }
    Ok(())
}

fn print(row: &Row, options: &Options, seconds: &[f64]) {
    println!(
        "\n{}: {} MiB, data in one MiB of {}; {} rounds, medians; server on CPU 0, client on CPU 1",
        row.name, options.mib, options.sparse, options.rounds
    );
    println!("  {:<46}{:>8} {:>7}", row.what, "s", "ratio");
    for ((name, ..), took) in row.pairs.iter().zip(seconds) {
        println!("  {name:<46}{took:>8.3} {:>6.2}x", took / seconds[0]);
    }
    if let Some(target) = row.target {
        let is_met = seconds.iter().skip(1).all(|took| took / seconds[0] >= target);
        println!("  target: {target}x of each: {}", if is_met { "met" } else { "missed" });
    }
}

impl Place {
    fn new(options: &Options) -> Result<Place, String> {
        let failed = |error: std::io::Error| format!("prepare the benchmark in {}: {error}", options.dir.display());
        let directory = tempfile::Builder::new().prefix("tapline-nbd-").tempdir_in(&options.dir).map_err(failed)?;
        let authority = Authority::new(&directory.path().join("certificates")).map_err(failed)?;
        let server_certificates = authority.server().map_err(failed)?;
        let client_certificates = authority.client().map_err(failed)?;
        let place = Place { directory, server_certificates, client_certificates };
        write_sparse(&place.image(), options).map_err(failed)?;
        Ok(place)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn image(&self) -> PathBuf {
        self.path("disk.raw")
    }

    /// Copies the disk once; returns the seconds that it took.
    fn copy(&self, server: Peer, client: Client, is_tls: bool) -> Result<f64, String> {
        let socket = self.path("nbd.sock");
        remove(&socket)?;
        let server = Server::begin(self.server(server, is_tls, &socket), socket.clone(), "the server")?;
        let copy = self.path("copy.raw");
        remove(&copy)?;
        let mut command = self.client(client, &self.uri(is_tls, &socket), &copy);
        let begun = Instant::now();
        let output = command.stdin(Stdio::null()).output().map_err(|error| format!("{command:?}: {error}"))?;
        let took = begun.elapsed().as_secs_f64();
        if !output.status.success() {
            return Err(format!("{command:?}: {}: {}", output.status, String::from_utf8_lossy(&output.stderr)));
        }
        remove(&copy)?;
        server.stop()?;
        Ok(took)
    }

    fn uri(&self, is_tls: bool, socket: &Path) -> String {
        let socket = socket.display();
        match is_tls {
            false => format!("nbd+unix:///?socket={socket}"),
            true => {
                let certificates = self.client_certificates.display();
                format!("nbds+unix://localhost/?socket={socket}&tls-certificates={certificates}")
            }
        }
    }

    fn server(&self, peer: Peer, is_tls: bool, socket: &Path) -> Command {
        let (image, certificates) = (self.image(), self.server_certificates.display().to_string());
        let mut command = Command::new("taskset");
        command.args(["-c", "0"]);
        match peer {
            Peer::Tapline => {
                command.arg(program("tapline-disk")).arg("serve").arg(format!("raw:{}", image.display()));
                command.args(["--read-only", "--cache", "writeback", "--nbd"]).arg(socket);
                if is_tls {
                    command.args(["--nbd-tls", &certificates]);
                }
            }
            Peer::Nbdkit => {
                command.args(["nbdkit", "--foreground", "--readonly", "--unix"]).arg(socket);
                if is_tls {
                    command.args(["--tls=require", "--tls-verify-peer", "--tls-certificates", &certificates]);
                }
                command.arg("file").arg(&image);
            }
            Peer::QemuNbd => {
                command.args(["qemu-nbd", "--persistent", "--read-only", "--shared=8", "--format=raw", "--socket"]);
                command.arg(socket);
                if is_tls {
                    let object = format!("tls-creds-x509,id=tls,endpoint=server,verify-peer=yes,dir={certificates}");
                    command.args(["--object", &object, "--tls-creds", "tls"]);
                }
                command.arg(&image);
            }
        }
        command
    }

    fn client(&self, client: Client, uri: &str, copy: &Path) -> Command {
        let mut command = Command::new("taskset");
        command.args(["-c", "1"]);
        match client {
            Client::NbdcopyToNull => command.args(["nbdcopy", uri, "null:"]),
            Client::NbdcopyToFile => command.args(["nbdcopy", uri]).arg(copy),
            Client::Convert => {
                let to = format!("raw:{}", copy.display());
                command.arg(program("tapline-disk")).args(["image", "convert", uri, &to])
            }
        };
        command
    }
}

/// Random data, which no server or client can leave out or compress.
fn write_sparse(path: &Path, options: &Options) -> std::io::Result<()> {
    let file = File::create(path)?;
    file.set_len(options.mib << 20)?;
    let mut random = fastrand::Rng::with_seed(45);
    let mut data = vec![0; 1 << 20];
    for at in (0..options.mib).filter(|at| at % options.sparse == 0) {
        random.fill(&mut data);
        file.write_all_at(&data, at << 20)?;
    }
    Ok(())
}
