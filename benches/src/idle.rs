//! What many idle disks cost: memory, and wake-ups.

use std::process::Command;
use std::time::Duration;

use testbed::process::{pss_kib, switches};

use super::server::Server;
use super::{Arguments, program, room, tapline};

/// What one idle process costs.
struct Cost {
    pss_kib: u64,
    switches: u64,
    cpu_seconds: f64,
}

/// Serves `arguments.disks` thin disks of 10 GiB and looks at them for `arguments.seconds`, in which nobody asks for
/// anything.
pub fn run(arguments: &Arguments) -> Result<(), String> {
    let work = room(arguments)?;
    let mut servers = Vec::new();
    for number in 0..arguments.disks {
        let dir = work.path().join(number.to_string());
        std::fs::create_dir(&dir).map_err(|error| format!("{}: {error}", dir.display()))?;
        let image = format!("vhd:{}", dir.join("disk.vhd").display());
        tapline(&["image", "create", &image, "--size", "10G"])?;
        let socket = dir.join("server.sock");
        let mut command = Command::new(program("tapline-disk"));
        // The engine that a disk has if nothing is said. Hundreds with Linux AIO need a higher fs.aio-max-nr: tmpfs has
        // no other one, so that --dir must be on another file system then.
        command.arg("serve").arg(&image).arg("--vhost-user").arg(&socket);
        servers.push(Server::begin(command, socket, "tapline vhd")?);
    }
    std::thread::sleep(Duration::from_secs(1));
    let before: Vec<Cost> = servers.iter().map(cost).collect::<Result<_, _>>()?;
    std::thread::sleep(Duration::from_secs_f64(arguments.seconds));
    let after: Vec<Cost> = servers.iter().map(cost).collect::<Result<_, _>>()?;
    let pss_max = after.iter().map(|cost| cost.pss_kib).max().unwrap_or(0);
    let pss_sum: u64 = after.iter().map(|cost| cost.pss_kib).sum();
    let switches: u64 = before.iter().zip(&after).map(|(before, after)| after.switches - before.switches).sum();
    let cpu: f64 = before.iter().zip(&after).map(|(before, after)| after.cpu_seconds - before.cpu_seconds).sum();
    let disks = arguments.disks;
    if arguments.json {
        let report = serde_json::json!({
            "disks": disks, "seconds": arguments.seconds, "pss_kib_mean": pss_sum / disks.max(1) as u64,
            "pss_kib_max": pss_max, "voluntary_ctxt_switches": switches, "cpu_seconds": cpu,
        });
        println!("{report}");
    } else {
        println!("{disks} idle served VHDs of 10 GiB, one process each, watched for {} s", arguments.seconds);
        println!("  PSS a process       {} KiB mean, {pss_max} KiB largest", pss_sum / disks.max(1) as u64);
        println!("  voluntary switches  {switches} in all processes together");
        println!("  CPU                 {cpu:.2} s in all processes together");
    }
    servers.into_iter().try_for_each(Server::stop)
}

fn cost(server: &Server) -> Result<Cost, String> {
    let pid = server.pid();
    Ok(Cost { pss_kib: pss_kib(pid)?, switches: switches(pid)?, cpu_seconds: server.cpu_seconds()? })
}
