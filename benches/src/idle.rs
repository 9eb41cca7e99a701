//! Cost of many idle disks, each with a connected client that sends nothing: memory and wake-ups.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::Duration;

use testbed::process::{pss_kib, switches};

use super::server::{Engine, Server, ServerKind};
use super::{Arguments, program, room, tapline};

/// Maximum memory (PSS) of a disk in KiB.
const PSS_MAX: f64 = 1.3 * 1024.0;

/// The cost of all idle processes.
#[derive(Debug, Default)]
struct Cost {
    /// Memory of each process.
    pss_kib: Vec<u64>,
    switches: u64,
    cpu_seconds: f64,
}

/// A connected client that sends nothing.
struct Held {
    child: Child,
    /// The client exits when this is closed.
    input: Option<ChildStdin>,
}

/// Serves `arguments.disks` thin disks of 10 GiB, with a process and a connected client each, and measures them for
/// `arguments.seconds` without requests. Then the same with the peer, on raw images.
pub fn run(arguments: &Arguments) -> Result<(), String> {
    let own = watch("tapline vhd", arguments, |place| {
        let image = format!("vhd:{}", place.join("disk.vhd").display());
        tapline(&["image", "create", &image, "--size", "10G"])?;
        // The default engine: on tmpfs Linux AIO, and io_uring beyond fs.aio-max-nr.
        let socket = place.join("server.sock");
        let mut command = Command::new(program("tapline-disk"));
        command.arg("serve").arg(&image).arg("--vhost-user").arg(&socket);
        Server::begin(command, socket, "tapline vhd")
    })?;
    let peer = watch("QSD raw", arguments, |place| {
        let image = place.join("disk.raw");
        let made = std::fs::File::create(&image).and_then(|file| file.set_len(10 << 30));
        made.map_err(|error| format!("{}: {error}", image.display()))?;
        Server::start(&ServerKind::qemu("QSD raw", "raw", &image).on(Engine::Uring), place)
    });
    if arguments.json {
        let report = |cost: &Cost| {
            serde_json::json!({
                "disks": arguments.disks, "seconds": arguments.seconds, "pss_kib_mean": cost.mean(),
                "pss_kib_max": cost.largest(), "voluntary_ctxt_switches": cost.switches,
                "cpu_seconds": cost.cpu_seconds,
            })
        };
        println!("{}", serde_json::json!({ "tapline vhd": report(&own), "QSD raw": peer.as_ref().ok().map(report) }));
        return Ok(());
    }
    println!(
        "{} idle disks of 10 GiB, a process and a connected client each, watched for {} s",
        arguments.disks, arguments.seconds
    );
    println!("  {:<14}{:>14} {:>14} {:>20} {:>12}", "", "PSS mean KiB", "PSS max KiB", "voluntary switches", "CPU s");
    print_row("tapline vhd", &own);
    match peer {
        Ok(peer) => print_row("QSD raw", &peer),
        Err(why) => println!("  {:<14}not measured: {why}", "QSD raw"),
    }
    let met = |is_met: bool| if is_met { "met" } else { "MISSED" };
    println!("  PSS, tapline vhd at most {PSS_MAX:.0} KiB: {:.0}, {}", own.mean(), met(own.mean() <= PSS_MAX));
    println!("  voluntary switches, tapline vhd 0: {}, {}", own.switches, met(own.switches == 0));
    Ok(())
}

fn print_row(name: &str, cost: &Cost) {
    let Cost { switches, cpu_seconds, .. } = cost;
    println!("  {name:<14}{:>14.0} {:>14} {switches:>20} {cpu_seconds:>12.2}", cost.mean(), cost.largest());
}

/// Starts the servers, each in its own directory, and measures them.
fn watch(name: &str, arguments: &Arguments, start: impl Fn(&Path) -> Result<Server, String>) -> Result<Cost, String> {
    let work = room(arguments)?;
    let mut disks = Vec::new();
    for number in 0..arguments.disks {
        eprint!("\r{name}: disk {}", number + 1);
        let place = work.path().join(number.to_string());
        std::fs::create_dir(&place).map_err(|error| format!("{}: {error}", place.display()))?;
        let server = start(&place)?;
        disks.push((Held::connect(&server)?, server));
    }
    eprint!("\r{:40}\r", "");
    // The work of a new connection ends.
    std::thread::sleep(Duration::from_secs(3));
    let cost = || disks.iter().map(|(_, server)| server).try_fold(Cost::default(), Cost::with);
    let before = cost()?;
    std::thread::sleep(Duration::from_secs_f64(arguments.seconds));
    let after = cost()?;
    for (client, server) in disks {
        drop(client);
        server.stop()?;
    }
    Ok(Cost {
        pss_kib: after.pss_kib,
        switches: after.switches - before.switches,
        cpu_seconds: after.cpu_seconds - before.cpu_seconds,
    })
}

impl Cost {
    fn with(mut self, server: &Server) -> Result<Cost, String> {
        let pid = server.pid();
        self.pss_kib.push(pss_kib(pid)?);
        self.switches += switches(pid)?;
        self.cpu_seconds += server.cpu_seconds()?;
        Ok(self)
    }

    fn mean(&self) -> f64 {
        self.pss_kib.iter().sum::<u64>() as f64 / self.pss_kib.len().max(1) as f64
    }

    fn largest(&self) -> u64 {
        self.pss_kib.iter().copied().max().unwrap_or(0)
    }
}

impl Held {
    fn connect(server: &Server) -> Result<Held, String> {
        let mut command = Command::new(program("bench-client"));
        command.arg(server.socket()).arg("--hold").stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(|error| format!("bench-client: {error}"))?;
        let mut line = String::new();
        let said = child.stdout.take().map(|output| BufReader::new(output).read_line(&mut line));
        let input = child.stdin.take();
        let held = Held { child, input };
        match said {
            Some(Ok(1..)) => Ok(held),
            _ => Err(format!("bench-client did not connect to {}", server.socket().display())),
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        drop(self.input.take());
        drop(self.child.wait());
    }
}
