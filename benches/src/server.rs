//! A server under test: started, pinned, measured and stopped.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use testbed::process::cpu_seconds;

/// The I/O engine of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    /// Linux AIO.
    Aio,
    /// io_uring.
    Uring,
}

/// The program of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Program {
    /// `tapline-disk serve`.
    Tapline,
    /// qemu-storage-daemon, with the name of a format of QEMU's.
    QemuStorageDaemon { format: &'static str },
    /// nbdkit's file plugin.
    Nbdkit,
    /// qemu-nbd, on a raw image.
    QemuNbd,
}

/// A server, its image, and its options.
#[derive(Clone, Debug)]
pub struct ServerKind {
    name: &'static str,
    program: Program,
    /// The images of a chain, leaf first.
    images: Vec<String>,
    engine: Engine,
    /// Whether it serves NBD instead of vhost-user-blk.
    nbd: bool,
    /// Whether it uses the page cache.
    cached: bool,
    more: &'static [&'static str],
}

impl ServerKind {
    /// `tapline serve` with Linux AIO, on a chain, leaf first.
    pub fn tapline(name: &'static str, images: Vec<String>) -> ServerKind {
        ServerKind {
            name,
            program: Program::Tapline,
            images,
            engine: Engine::Aio,
            nbd: false,
            cached: false,
            more: &[],
        }
    }

    /// qemu-storage-daemon, with Linux AIO and O_DIRECT, on one image of a format of QEMU's.
    pub fn qemu(name: &'static str, format: &'static str, image: &Path) -> ServerKind {
        let program = Program::QemuStorageDaemon { format };
        ServerKind { program, ..ServerKind::tapline(name, vec![image.display().to_string()]) }
    }

    /// nbdkit on a raw image.
    pub fn nbdkit(name: &'static str, image: &Path) -> ServerKind {
        ServerKind {
            program: Program::Nbdkit,
            nbd: true,
            ..ServerKind::tapline(name, vec![image.display().to_string()])
        }
    }

    /// qemu-nbd on a raw image, with Linux AIO and O_DIRECT.
    pub fn qemu_nbd(name: &'static str, image: &Path) -> ServerKind {
        ServerKind { program: Program::QemuNbd, ..ServerKind::nbdkit(name, image) }
    }

    /// Uses another I/O engine.
    pub fn on(self, engine: Engine) -> ServerKind {
        ServerKind { engine, ..self }
    }

    /// Serves over NBD.
    pub fn over_nbd(self) -> ServerKind {
        ServerKind { nbd: true, ..self }
    }

    /// Uses the page cache.
    pub fn cached(self) -> ServerKind {
        ServerKind { cached: true, ..self }
    }

    /// Adds options of `tapline serve`.
    pub fn with(self, more: &'static [&'static str]) -> ServerKind {
        ServerKind { more, ..self }
    }

    /// The name in the tables.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Removes its images from the page cache.
    pub fn evict(&self) -> Result<(), String> {
        for image in &self.images {
            let path = image.split_once(':').map_or(image.as_str(), |(_, path)| path);
            let mut command = Command::new("dd");
            // With a count of 0, GNU dd drops the whole file from the cache and reads nothing.
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
            // A raw image is exported directly as a file, without a format node.
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
    pub fn start(kind: &ServerKind, work: &Path) -> Result<Server, String> {
        let socket = work.join("server.sock");
        // The socket of a server that was killed.
        remove(&socket)?;
        Server::begin(kind.command(&socket), socket, kind.name())
    }

    /// Starts a command that listens at this socket, and waits for that.
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

    /// The path of `tapline serve`'s control socket.
    pub fn control(&self) -> PathBuf {
        self.socket.with_extension("control")
    }

    /// The path of its socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// The pid of its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// User and system time of all its threads in seconds.
    pub fn cpu_seconds(&self) -> Result<f64, String> {
        cpu_seconds(self.child.id())
    }

    /// Stops it cleanly.
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
        // After `stop` it has exited; on an error path it must be killed.
        if matches!(self.child.try_wait(), Ok(None)) && self.child.kill().is_ok() {
            drop(self.child.wait());
        }
    }
}

/// Removes a file, if it exists.
pub fn remove(path: &Path) -> Result<(), String> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(format!("{}: {error}", path.display())),
        _ => Ok(()),
    }
}

/// Whether the kernel shows a listener at the path. A test connection would be a client, and a server may serve only
/// one.
fn is_listening(socket: &Path) -> bool {
    let table = std::fs::read_to_string("/proc/net/unix").unwrap_or_default();
    // The flags of a listening socket are 00010000.
    table.lines().any(|line| line.ends_with(&*socket.to_string_lossy()) && line.contains(" 00010000 "))
}
