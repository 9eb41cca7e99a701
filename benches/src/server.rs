//! A server under test: started, pinned, asked for its CPU time, stopped.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use testbed::process::cpu_seconds;

/// How a server reaches its image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    /// Linux AIO.
    Aio,
    /// io_uring.
    Uring,
}

/// Which program serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Program {
    /// `tapline-disk serve`.
    Tapline,
    /// qemu-storage-daemon, on an image of a format of QEMU's.
    QemuStorageDaemon { format: &'static str },
    /// nbdkit's file plugin.
    Nbdkit,
    /// qemu-nbd, on a raw image.
    QemuNbd,
}

/// Which server, on which image, and how.
#[derive(Clone, Debug)]
pub struct Kind {
    name: &'static str,
    program: Program,
    /// A chain, leaf first.
    images: Vec<String>,
    engine: Engine,
    /// It serves NBD, and not vhost-user-blk.
    nbd: bool,
    /// Through the page cache.
    cached: bool,
    more: &'static [&'static str],
}

impl Kind {
    /// `tapline serve` with Linux AIO, on a chain, leaf first.
    pub fn tapline(name: &'static str, images: Vec<String>) -> Kind {
        Kind { name, program: Program::Tapline, images, engine: Engine::Aio, nbd: false, cached: false, more: &[] }
    }

    /// qemu-storage-daemon, with Linux AIO and O_DIRECT, on one image of a format of QEMU's.
    pub fn qemu(name: &'static str, format: &'static str, image: &Path) -> Kind {
        let program = Program::QemuStorageDaemon { format };
        Kind { program, ..Kind::tapline(name, vec![image.display().to_string()]) }
    }

    /// nbdkit on a raw image.
    pub fn nbdkit(name: &'static str, image: &Path) -> Kind {
        Kind { program: Program::Nbdkit, nbd: true, ..Kind::tapline(name, vec![image.display().to_string()]) }
    }

    /// qemu-nbd on a raw image, with Linux AIO and O_DIRECT.
    pub fn qemu_nbd(name: &'static str, image: &Path) -> Kind {
        Kind { program: Program::QemuNbd, ..Kind::nbdkit(name, image) }
    }

    /// The same with another engine.
    pub fn on(self, engine: Engine) -> Kind {
        Kind { engine, ..self }
    }

    /// The same over NBD.
    pub fn over_nbd(self) -> Kind {
        Kind { nbd: true, ..self }
    }

    /// The same through the page cache.
    pub fn cached(self) -> Kind {
        Kind { cached: true, ..self }
    }

    /// The same with more options of `tapline serve`.
    pub fn with(self, more: &'static [&'static str]) -> Kind {
        Kind { more, ..self }
    }

    /// What the tables call it.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Takes its images out of the page cache.
    pub fn evict(&self) -> Result<(), String> {
        for image in &self.images {
            let path = image.split_once(':').map_or(image.as_str(), |(_, path)| path);
            let mut command = Command::new("dd");
            // GNU's dd does this with a count of 0: it drops the whole file, and reads nothing.
            command.args([&format!("if={path}"), "iflag=nocache", "count=0", "status=none"]);
            let evicted = command.status().map_err(|error| format!("dd: {error}"))?;
            if !evicted.success() {
                return Err(format!("{command:?}: {evicted}"));
            }
        }
        Ok(())
    }

    /// Whether it serves NBD.
    pub fn is_nbd(&self) -> bool {
        self.nbd
    }

    fn command(&self, socket: &Path) -> Command {
        let mut command = Command::new("taskset");
        command.args(["-c", "0"]);
        let image = self.images.first().map_or("", String::as_str);
        match self.program {
            Program::Tapline => self.serve(socket, &mut command),
            Program::QemuStorageDaemon { format } => self.export(format, image, socket, &mut command),
            Program::Nbdkit => {
                command.args(["nbdkit", "--foreground", "--unix"]).arg(socket).arg("file").arg(format!("file={image}"));
            }
            Program::QemuNbd => {
                command.args(["qemu-nbd", "--persistent", "--format=raw", "--cache=none", "--aio=native", "--socket"]);
                command.arg(socket).arg(image);
            }
        }
        command
    }

    fn serve(&self, socket: &Path, command: &mut Command) {
        command.arg(super::program("tapline-disk")).arg("serve");
        for (depth, image) in self.images.iter().enumerate() {
            if depth > 0 {
                command.arg("--parent");
            }
            command.arg(image);
        }
        command.arg(if self.nbd { "--nbd" } else { "--vhost-user" }).arg(socket);
        // A disk without storage has no engine.
        if !self.images.iter().any(|image| image.starts_with("null:")) {
            command.args(["--io-engine", if self.engine == Engine::Aio { "aio" } else { "uring" }]);
        }
        if self.cached {
            command.args(["--cache", "writeback"]);
        }
        command.args(self.more).arg("--control").arg(socket.with_extension("control"));
    }

    fn export(&self, format: &str, image: &str, socket: &Path, command: &mut Command) {
        command.arg("qemu-storage-daemon");
        if format == "null-co" {
            command.args(["--blockdev", &format!("driver=null-co,size={image},node-name=disk,read-zeroes=off")]);
        } else {
            // A raw image is exported as the file that it is: one node less for the peer to pass.
            let node = if format == "raw" { "disk" } else { "file" };
            let engine = match self.engine {
                Engine::Aio => "native",
                Engine::Uring => "io_uring",
            };
            let file = format!("driver=file,filename={image},node-name={node}");
            let direct = if self.cached { "off" } else { "on" };
            command.args(["--blockdev", &format!("{file},cache.direct={direct},aio={engine},discard=unmap")]);
            if format != "raw" {
                command.args(["--blockdev", &format!("driver={format},file=file,node-name=disk")]);
            }
        }
        command.arg("--export");
        let address = format!("addr.type=unix,addr.path={}", socket.display());
        command.arg(format!("type=vhost-user-blk,id=export,node-name=disk,{address},writable=on"));
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
        Server::begin(kind.command(&socket), socket, kind.name())
    }

    /// The same for a command that listens at this socket.
    pub fn begin(mut command: Command, socket: PathBuf, name: &str) -> Result<Server, String> {
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let child = command.spawn().map_err(|error| format!("start {name}: {error}"))?;
        let mut server = Server { child, socket };
        let begin = Instant::now();
        while !is_listening(&server.socket) {
            if let Ok(Some(status)) = server.child.try_wait() {
                return Err(format!("{name} ended at once: {status}; run {command:?}"));
            }
            if begin.elapsed() > Duration::from_secs(20) {
                return Err(format!("{name} does not listen"));
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
        cpu_seconds(self.child.id())
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
