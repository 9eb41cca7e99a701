//! A vhost-user-blk server under test: started, pinned, asked for its CPU time, stopped.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Which server, on which image.
pub enum Kind {
    /// The peer, with Linux AIO and O_DIRECT, on one image of a format of QEMU's.
    QemuStorageDaemon { name: &'static str, format: &'static str, image: PathBuf },
    /// `tapline serve` with Linux AIO, on a chain, leaf first.
    Tapline { name: &'static str, images: Vec<String> },
}

impl Kind {
    /// What the tables call it.
    pub fn name(&self) -> &'static str {
        match self {
            Kind::QemuStorageDaemon { name, .. } | Kind::Tapline { name, .. } => name,
        }
    }

    fn command(&self, socket: &Path) -> Command {
        let mut command = Command::new("taskset");
        command.args(["-c", "0"]);
        match self {
            Kind::QemuStorageDaemon { format, image, .. } => {
                command.arg("qemu-storage-daemon");
                // A raw image is exported as the file that it is: one node less for the peer to pass.
                let node = if *format == "raw" { "disk" } else { "file" };
                let file = format!("driver=file,filename={},node-name={node}", image.display());
                command.args(["--blockdev", &format!("{file},cache.direct=on,aio=native,discard=unmap")]);
                if *format != "raw" {
                    command.args(["--blockdev", &format!("driver={format},file=file,node-name=disk")]);
                }
                command.arg("--export");
                let address = format!("addr.type=unix,addr.path={}", socket.display());
                command.arg(format!("type=vhost-user-blk,id=export,node-name=disk,{address},writable=on"));
            }
            Kind::Tapline { images, .. } => {
                command.arg(super::program("tapline-disk")).arg("serve");
                for (depth, image) in images.iter().enumerate() {
                    if depth > 0 {
                        command.arg("--parent");
                    }
                    command.arg(image);
                }
                command.arg("--vhost-user").arg(socket).args(["--io-engine", "aio"]);
                command.arg("--control").arg(socket.with_extension("control"));
            }
        }
        command
    }
}

/// A running server.
pub struct Server {
    child: Child,
    socket: PathBuf,
}

impl Server {
    /// Starts it and waits until it listens.
    pub fn start(kind: &Kind, work: &Path) -> Result<Server, String> {
        let socket = work.join("server.sock");
        // What a server that was killed may have left.
        match std::fs::remove_file(&socket) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error.to_string()),
            _ => {}
        }
        let child = kind
            .command(&socket)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|error| format!("start {}: {error}", kind.name()))?;
        let mut server = Server { child, socket };
        let begin = Instant::now();
        while !is_listening(&server.socket) {
            if let Ok(Some(status)) = server.child.try_wait() {
                return Err(format!("{} ended at once: {status}; run {:?}", kind.name(), kind.command(&server.socket)));
            }
            if begin.elapsed() > Duration::from_secs(20) {
                return Err(format!("{} does not listen", kind.name()));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(server)
    }

    /// Where ours listens for orders.
    pub fn control(&self) -> PathBuf {
        self.socket.with_extension("control")
    }

    /// Where it listens.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// User and system time of all its threads so far.
    pub fn cpu_seconds(&self) -> Result<f64, String> {
        let path = format!("/proc/{}/stat", self.child.id());
        let stat = std::fs::read_to_string(&path).map_err(|error| format!("{path}: {error}"))?;
        // The name in parentheses may hold spaces; utime and stime are fields 14 and 15.
        let fields: Vec<&str> = stat.rsplit(") ").next().unwrap_or_default().split(' ').collect();
        let ticks = |at: usize| fields.get(at).and_then(|field| field.parse::<f64>().ok()).unwrap_or(0.0);
        // USER_HZ is 100 on every architecture of ours.
        Ok((ticks(11) + ticks(12)) / 100.0)
    }

    /// Ends it in good order.
    pub fn stop(mut self) -> Result<(), String> {
        let pid = self.child.id().to_string();
        let killed = Command::new("kill").args(["-TERM", &pid]).status();
        if !killed.is_ok_and(|status| status.success()) {
            return Err(format!("kill {pid} failed"));
        }
        self.child.wait().map_err(|error| error.to_string())?;
        Ok(())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // After `stop` it has ended already; on an error path it must not be left behind.
        if matches!(self.child.try_wait(), Ok(None)) && self.child.kill().is_ok() {
            drop(self.child.wait());
        }
    }
}

/// Whether the kernel shows a listener at the path. A trial connection would be a client that comes and goes,
/// and a server may serve only one.
fn is_listening(socket: &Path) -> bool {
    let table = std::fs::read_to_string("/proc/net/unix").unwrap_or_default();
    // Flags 00010000 are those of a listening socket.
    table.lines().any(|line| line.ends_with(&*socket.to_string_lossy()) && line.contains(" 00010000 "))
}
