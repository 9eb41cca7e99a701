//! Tests with `taplined` itself, built in the directory of `tapline`.

use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::OnceLock;

use api::Host;
use api::client::Client;

use crate::play::{err, out, run};

/// A daemon with its own directory; killed with its disk processes on drop.
pub struct Daemon {
    directory: tempfile::TempDir,
    process: Child,
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.process.kill().and_then(|()| self.process.wait()).unwrap();
        // The processes it has started outlive it.
        for (pid, words) in processes() {
            if words.contains(&self.directory.path().display().to_string()) {
                rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap_or_default();
            }
        }
    }
}

/// All processes, with their command lines.
fn processes() -> impl Iterator<Item = (rustix::process::Pid, String)> {
    std::fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| {
        let pid = rustix::process::Pid::from_raw(entry.file_name().to_str()?.parse().ok()?)?;
        let words = std::fs::read(entry.path().join("cmdline")).ok()?;
        Some((pid, String::from_utf8_lossy(&words).into_owned()))
    })
}

impl Daemon {
    fn start() -> Daemon {
        Daemon::start_with("")
    }

    /// Starts a daemon with additional settings in TOML.
    pub fn start_with(settings: &str) -> Daemon {
        let directory = tempfile::tempdir().unwrap();
        let config = directory.path().join("taplined.toml");
        let path = |name: &str| directory.path().join(name).display().to_string();
        let text = format!(
            "state-directory = {:?}\nrun-directory = {:?}\nlog-directory = {:?}\n{settings}\n",
            path("state"),
            path("run"),
            path("log")
        );
        std::fs::write(&config, text).unwrap();
        let process = spawn(&config, &directory.path().join("stderr"));
        let daemon = Daemon { directory, process };
        daemon.wait_for();
        daemon
    }

    /// The path of its socket.
    pub fn socket(&self) -> PathBuf {
        self.directory.path().join("run/taplined.sock")
    }

    /// Kills the daemon and starts another one.
    pub fn restart(&mut self) {
        self.stop();
        let path = |name: &str| self.directory.path().join(name);
        self.process = spawn(&path("taplined.toml"), &path("stderr"));
        self.wait_for();
    }

    /// Kills the daemon; its disks keep running.
    pub fn stop(&mut self) {
        self.process.kill().and_then(|()| self.process.wait()).unwrap();
    }

    fn wait_for(&self) {
        while std::os::unix::net::UnixStream::connect(self.socket()).is_err() {
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }

    /// Its directory, for files of the test.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// The text of its log.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.directory.path().join("stderr")).unwrap()
    }
}

fn spawn(config: &Path, log: &Path) -> Child {
    let mut taplined = Command::new(program());
    taplined.arg("--config").arg(config).stderr(std::fs::File::create(log).unwrap()).spawn().unwrap()
}

/// The daemon's program, built if necessary, because cargo builds only the programs of the crate under test.
fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        let program = Path::new(env!("CARGO_BIN_EXE_tapline")).with_file_name("taplined");
        if !program.exists() {
            let built = Command::new(env!("CARGO")).args(["build", "-q", "-p", "taplined"]).status().unwrap();
            assert!(built.success(), "taplined cannot be built");
        }
        program
    })
}

#[test]
fn the_host_is_shown() {
    let daemon = Daemon::start();
    let text = out(&run(&daemon.socket(), &["host", "show"]));
    assert!(text.contains("\n        taplined: ") && text.contains("\n     plug window: 10\n"), "{text}");
    let host: Host = serde_json::from_str(&out(&run(&daemon.socket(), &["host", "show", "--json"]))).unwrap();
    assert!(text.contains(&host.uuid.to_string()));
    // The option takes precedence over the environment.
    let other = run(&daemon.socket(), &["host", "--socket", "/nowhere/at/all", "show"]);
    assert_eq!(other.status.code(), Some(10));
    assert!(err(&other).contains("/nowhere/at/all"), "{}", err(&other));
}

#[test]
fn there_are_no_tasks_and_none_can_be_found() {
    let daemon = Daemon::start();
    assert_eq!(
        out(&run(&daemon.socket(), &["task", "list", "--all"])),
        "UUID  VERB  STATE  DONE  STEP  CREATED  ABOUT\n"
    );
    assert_eq!(out(&run(&daemon.socket(), &["task", "list", "--json"])), "[]\n");
    let none = run(&daemon.socket(), &["task", "wait", "abcd"]);
    let text = "tapline: no task has a UUID that begins with 'abcd'\n  give at least 4 digits of it; 'tapline task list \
                --all' shows it\n";
    assert_eq!((none.status.code(), err(&none).as_str()), (Some(6), text));
    let uuid = uuid::Uuid::from_u128(7).to_string();
    let unknown = run(&daemon.socket(), &["task", "cancel", &uuid]);
    assert_eq!(unknown.status.code(), Some(6));
    assert!(err(&unknown).contains(&uuid), "{}", err(&unknown));
}

#[test]
fn a_host_without_disks_is_drained() {
    let daemon = Daemon::start();
    let output = run(&daemon.socket(), &["host", "drain", "--timeout", "5"]);
    assert_eq!(out(&output), "");
    assert!(err(&output).ends_with("host-drain: done\n"), "{}", err(&output));
    let listed = out(&run(&daemon.socket(), &["task", "list", "--all"]));
    assert!(listed.contains("  host-drain  done   100 %"), "{listed}");
    let begun = out(&run(&daemon.socket(), &["host", "drain", "--no-wait"]));
    let waited = out(&run(&daemon.socket(), &["task", "wait", begun.trim().get(..8).unwrap()]));
    assert!(waited.contains("      state: done\n"), "{waited}");
}

#[test]
fn refusals_of_the_daemon_are_printed() {
    let daemon = Daemon::start();
    let uuid = uuid::Uuid::from_u128(7).to_string();
    assert_eq!(out(&run(&daemon.socket(), &["vdi", "list", "root", "--json"])), "[]\n");
    assert_eq!(out(&run(&daemon.socket(), &["vbd", "list", "--vdi", &uuid, "--json"])), "[]\n");
    for words in [
        &["vdi", "create", "root", "--sr", &uuid, "--size", "10G"][..],
        &["vdi", "snapshot", &uuid],
        &["vdi", "destroy", &uuid, "--dry-run"],
        &["vbd", "create", "--vdi", &uuid],
        &["vbd", "plug", &uuid],
        &["vbd", "destroy", &uuid],
    ] {
        let refused = run(&daemon.socket(), words);
        assert_eq!(refused.status.code(), Some(6), "{words:?}");
        assert!(err(&refused).contains(&uuid), "{words:?}: {}", err(&refused));
    }
}

#[tokio::test]
async fn events_can_be_followed() {
    let daemon = Daemon::start();
    Client::new(daemon.socket()).events(None).await.unwrap();
    // The daemon does not know a number that never existed, so the client must reload everything.
    let mut events = Client::new(daemon.socket()).events(Some(1_000_000)).await.unwrap();
    assert_eq!(events.next().await, api::client::StreamItem::Reset);
}

#[test]
fn following_stops_silently_on_a_closed_pipe() {
    let daemon = Daemon::start();
    for words in [&["event", "follow"][..], &["task", "watch"]] {
        let mut follow = Command::new(env!("CARGO_BIN_EXE_tapline"));
        let pipe = std::process::Stdio::piped;
        let mut follow =
            follow.args(words).env("TAPLINE_SOCKET", daemon.socket()).stdout(pipe()).stderr(pipe()).spawn().unwrap();
        drop(follow.stdout.take());
        // Whether it is following already is unknown, so changes are made until it has ended.
        while follow.try_wait().unwrap().is_none() {
            out(&run(&daemon.socket(), &["host", "drain"]));
        }
        let ended = follow.wait_with_output().unwrap();
        assert_eq!((ended.status.code(), err(&ended).as_str()), (Some(0), ""));
    }
}

/// Runs a command that must succeed; returns its output without the line's end.
fn done(daemon: &Daemon, words: &[&str]) -> String {
    out(&run(&daemon.socket(), words)).trim_end().to_owned()
}

#[test]
fn creating_and_attaching_a_disk_is_idempotent() {
    let daemon = Daemon::start();
    let disks = daemon.directory.path().join("disks");
    std::fs::create_dir(&disks).unwrap();
    let refused = run(&daemon.socket(), &["vdi", "attach", "data", "--new", "64M"]);
    assert_eq!(refused.status.code(), Some(6));
    assert!(err(&refused).contains("tapline sr create NAME --dir DIRECTORY"), "{}", err(&refused));
    done(&daemon, &["sr", "create", "fast", "--dir", disks.to_str().unwrap()]);
    let vbd = done(&daemon, &["vdi", "attach", "data", "--new", "64M"]);
    assert_eq!(done(&daemon, &["vdi", "attach", "data"]), vbd);
    assert_eq!(done(&daemon, &["vbd", "plug", "data"]), "", "it is plugged already");
    let pasted = run(&daemon.socket(), &["vdi", "attach", "data", "--print", "libvirt"]);
    assert!(err(&pasted).contains("note: only root may open ") && err(&pasted).contains("socket-group"));
    assert!(out(&pasted).contains("<disk type='vhostuser'"), "{}", out(&pasted));
    let device = out(&run(&daemon.socket(), &["vbd", "connect", "data", "--for", "libvirt-device"]));
    assert!(device.contains("<disk type='vhostuser'") && !device.contains("<memoryBacking>"), "{device}");
    done(&daemon, &["vdi", "resize", "data", "--size", "96M"]);
    let listed = done(&daemon, &["vbd", "list"]);
    assert!(listed.lines().nth(1).unwrap().contains("  -   data  "), "{listed}");
    assert_eq!(done(&daemon, &["vbd", "list", "-q"]), vbd);
    let chosen = ["vdi", "list", "--columns", "name,state,sr", "--sort", "-virtual"];
    assert_eq!(done(&daemon, &chosen), "NAME  STATE   SR\ndata  in use  fast");
    // Options of the daemon may precede the noun.
    assert_eq!(
        out(&Command::new(env!("CARGO_BIN_EXE_tapline"))
            .arg("--socket")
            .arg(daemon.socket())
            .args(["vdi", "list", "-o", "name"])
            .output()
            .unwrap()),
        "data\n"
    );
    let mut completed = Command::new(env!("CARGO_BIN_EXE_tapline"));
    completed.env("TAPLINE_COMPLETE", "fish").env("TAPLINE_SOCKET", daemon.socket());
    let completed = completed.args(["--", "tapline", "vdi", "snapshot", "d"]).output().unwrap();
    assert_eq!(out(&completed), "data\t96 MiB\n");
    done(&daemon, &["vdi", "detach", "data"]);
    done(&daemon, &["vdi", "detach", "data"]);
    assert_eq!(done(&daemon, &["vbd", "list", "-q"]), "");
}

#[test]
fn a_new_disk_is_in_the_virtual_size_of_its_repository_at_once() {
    let daemon = Daemon::start();
    done(&daemon, &["sr", "create", "fast", "--dir", daemon.directory().join("sr").to_str().unwrap()]);
    for virtual_size in ["64 MiB", "128 MiB", "192 MiB"] {
        done(&daemon, &["vdi", "create", &format!("upto {virtual_size}"), "64M"]);
        let listed = done(&daemon, &["sr", "list", "--columns", "name,virtual"]);
        assert!(listed.ends_with(virtual_size), "{listed}");
    }
}

#[test]
fn a_directory_of_images_is_introduced_with_a_disk_for_each() {
    let daemon = Daemon::start();
    let images = daemon.directory().join("images");
    std::fs::create_dir(&images).unwrap();
    for (image, size) in [("vhd:a.vhd", "10M"), ("qcow2:b.qcow2", "20M")] {
        let (format, file) = image.split_once(':').unwrap();
        let image = format!("{format}:{}", images.join(file).display());
        done(&daemon, &["image", "create", &image, "--size", size]);
    }
    std::fs::write(images.join("notes.qcow2"), "no image").unwrap();
    let said = run(&daemon.socket(), &["sr", "introduce", "images", "--dir", images.to_str().unwrap()]);
    let shown = String::from_utf8_lossy(&said.stderr).into_owned();
    assert!(said.status.success(), "{shown}");
    assert_eq!(done(&daemon, &["vdi", "list", "--output", "name", "--sort", "name"]), "a\nb");
    for line in ["a.vhd: disk \"a\" (", "vhd of 10 MiB", "qcow2 of 20 MiB", "unplaced  notes.qcow2: "] {
        assert!(shown.contains(line), "no {line}: {shown}");
    }
    // The same for a script.
    let uuid = String::from_utf8_lossy(&said.stdout).into_owned();
    assert_eq!(done(&daemon, &["sr", "list", "--output", "uuid"]), uuid.trim_end());
}

#[test]
fn a_machine_is_created_with_its_disks_or_not_at_all() {
    let daemon = Daemon::start();
    let disks = daemon.directory.path().join("disks");
    std::fs::create_dir(&disks).unwrap();
    done(&daemon, &["sr", "create", "fast", "--dir", disks.to_str().unwrap()]);
    done(&daemon, &["vdi", "create", "data", "--size", "64M"]);
    let web = ["vm", "create", "web", "--disk", "root=128M", "--disk", "data", "--cdrom", "/a.iso", "--nic", "user"];
    let vm = done(&daemon, &web);
    let shown = done(&daemon, &["vm", "show", "web"]);
    assert!(shown.contains(&vm) && shown.contains("dvd=file:/a.iso") && shown.contains("nic=user"), "{shown}");
    let listed = done(&daemon, &["vbd", "list", "--vm", "web", "--columns", "vm,vdi,position,state"]);
    assert_eq!(listed, "VM   VDI   POSITION  STATE\nweb  root         0  unplugged\nweb  data         1  unplugged");
    assert_eq!(done(&daemon, &["vbd", "show", "web/vdb"]), done(&daemon, &["vbd", "show", "data"]));
    let wrong = run(&daemon.socket(), &["vbd", "show", "web/vdc"]);
    assert!(wrong.status.code() == Some(6) && err(&wrong).contains("the vm 'web' has no disk vdc"), "{}", err(&wrong));
    // The last disk does not exist, so all objects created for the machine are removed.
    let refused = run(&daemon.socket(), &["vm", "create", "db", "--disk", "new=64M", "--disk", "nowhere"]);
    assert_eq!(refused.status.code(), Some(6), "{}", err(&refused));
    assert_eq!(done(&daemon, &["vm", "list", "-o", "name"]), "web");
    assert_eq!(done(&daemon, &["vdi", "list", "-o", "name", "--sort", "name"]), "data\nroot");
}

#[test]
fn disks_are_distinguished_by_name() {
    let daemon = Daemon::start();
    let disks = daemon.directory.path().join("disks");
    std::fs::create_dir(&disks).unwrap();
    done(&daemon, &["sr", "create", "fast", "--dir", disks.to_str().unwrap()]);
    let web = done(&daemon, &["vdi", "create", "web", "--size", "64M"]);
    let snapshot = done(&daemon, &["vdi", "snapshot", "web"]);
    done(&daemon, &["vdi", "clone", &snapshot, "--name", "copy"]);
    done(&daemon, &["vdi", "clone", "web"]);
    let tree: serde_json::Value = serde_json::from_str(&done(&daemon, &["vdi", "tree", "--json"])).unwrap();
    assert_eq!((tree.as_array().unwrap().len(), &tree[0]["name"]), (1, &serde_json::json!("web")), "{tree}");
    let below: Vec<&str> =
        tree[0]["children"].as_array().unwrap().iter().map(|one| one["name"].as_str().unwrap()).collect();
    assert!(below.len() == 2 && below[0].starts_with("web@20") && below[1] == "web-clone", "{tree}");
    assert_eq!(tree[0]["children"][0]["children"][0]["name"], "copy");
    let only = done(&daemon, &["vdi", "tree", "web", "--sr", "fast"]);
    assert_eq!(only.lines().count(), 5, "{only}");
    let refused = run(&daemon.socket(), &["vdi", "create", "web", "--size", "64M"]);
    assert_eq!(refused.status.code(), Some(7));
    assert!(err(&refused).contains(&format!("cannot create VDI 'web': VDI {web} in SR 'fast'")), "{}", err(&refused));
    let refused = run(&daemon.socket(), &["vdi", "resize", "web", "--size", "32M"]);
    assert!(err(&refused).starts_with(&format!("tapline: disk \"web\" ({web}) ")), "{}", err(&refused));
    done(&daemon, &["vdi", "create", "web", "--size", "64M", "--allow-duplicate-name"]);
    let refused = run(&daemon.socket(), &["vdi", "show", "web"]);
    assert!(refused.status.code() == Some(64) && err(&refused).contains("disk  web   fast"), "{}", err(&refused));
}

#[test]
fn a_refusal_is_json_for_programs() {
    let daemon = Daemon::start();
    let refused = run(&daemon.socket(), &["vdi", "show", "nowhere", "--json"]);
    let line: serde_json::Value = serde_json::from_slice(&refused.stderr).unwrap();
    assert_eq!((&line["error"]["code"], refused.status.code()), (&serde_json::json!("not-found"), Some(6)));
    assert!(refused.stdout.is_empty());
}
