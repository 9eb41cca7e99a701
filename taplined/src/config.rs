//! The daemon's settings: a TOML file in which every setting has a default (docs/taplined.toml).

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use api::{Code, Limits, Problem};
use control::{CpuList, THREADS_MAX};
use serde::{Deserialize, Serialize};
use utoipa::{PartialSchema, ToSchema};

use crate::account::Range;

/// All settings of the daemon.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default, rename_all = "kebab-case", deny_unknown_fields)]
pub struct Config {
    /// Directory for what must survive a reboot of the host: the catalogue.
    #[schema(value_type = String)]
    pub state_directory: PathBuf,
    /// Directory for the memory of suspended VMs, of which each needs as much space as the VM has memory; if not set,
    /// `suspended` in the state directory.
    #[schema(value_type = Option<String>)]
    pub suspended_directory: Option<PathBuf>,
    /// Directory for what must survive a restart of the daemon, but not of the host: sockets. Its path must be short,
    /// because a socket path has at most 107 bytes.
    #[schema(value_type = String)]
    pub run_directory: PathBuf,
    /// Directory for logs.
    #[schema(value_type = String)]
    pub log_directory: PathBuf,
    /// The program of the disk processes; if not set, it is looked for in this program's directory, then in the PATH.
    #[schema(value_type = Option<String>)]
    pub disk_program: Option<PathBuf>,
    /// The user that all disk processes run as, which should own nothing; if not set, each process has a uid of its own
    /// from `disk-user-range`. Only if the daemon is root.
    pub disk_user: Option<String>,
    /// A range of unused uids, of which each disk process gets its own.
    pub disk_user_range: String,
    /// The user that all QEMU processes run as; if not set, each has a uid of its own from `qemu-user-range`. Only if
    /// the daemon is root.
    pub qemu_user: Option<String>,
    /// A range of unused uids, of which each QEMU gets its own.
    pub qemu_user_range: String,
    /// The `oom_score_adj` of disk processes, −1000 (never killed) to 1000 (killed first). A guest that loses its disk
    /// is worse off than one that is killed.
    pub disk_oom_score_adj: i16,
    /// Maximum milliseconds that a guest's requests may wait during an upgrade of its disk's process; if it would take
    /// longer, the old process continues.
    pub upgrade_pause_max: u32,
    /// The program of virtual machines: a path, or a name in the PATH.
    #[schema(value_type = String)]
    pub qemu_program: PathBuf,
    /// The program of Xen's toolstack, for VMs with the driver `xen`: a path, or a name in the PATH.
    #[schema(value_type = String)]
    pub xl_program: PathBuf,
    /// Settings of the API.
    pub api: Api,
    /// Settings of the NBD address.
    pub nbd: Nbd,
    /// Settings of plugging.
    pub plug: Plug,
    /// Settings of storage monitoring.
    pub storage: Storage,
    /// Settings of what is started with the host.
    pub autostart: Autostart,
    /// Settings of the catalogue.
    pub catalogue: CatalogueCopies,
    /// Settings of the log.
    pub log: Log,
}

/// Settings of the catalogue.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default, rename_all = "kebab-case", deny_unknown_fields)]
pub struct CatalogueCopies {
    /// Number of days for which a backup is kept; also the number of backups on request that are kept.
    pub backups: u32,
    /// Seconds between checks of the catalogue, which is backed up if it has changed.
    pub backup_interval: u32,
}

impl Default for CatalogueCopies {
    fn default() -> CatalogueCopies {
        CatalogueCopies { backups: 7, backup_interval: 24 * 3600 }
    }
}

/// Settings of storage monitoring.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default, rename_all = "kebab-case", deny_unknown_fields)]
pub struct Storage {
    /// Seconds that storage may take to respond before the request fails.
    pub answer_timeout: u32,
    /// Seconds between checks whether a lost repository is back.
    pub lost_interval: u32,
    /// Seconds between measurements of a repository's free space while one of its disks is writable.
    pub measure_interval: u32,
    /// The same while guests are waiting for space in the repository.
    pub full_interval: u32,
}

/// Settings of the API.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default, rename_all = "kebab-case", deny_unknown_fields)]
pub struct Api {
    /// A group whose members may use the API like root; if not set, only root and the daemon's own user may.
    pub group: Option<String>,
    /// Maximum number of connections to the Unix socket; further ones wait.
    pub connections_max: u32,
    /// Addresses at which the API is also served over TCP, with TLS and tokens; none if not set.
    #[schema(value_type = Vec<String>)]
    pub listen: Vec<SocketAddr>,
    /// A PEM file with the daemon's certificate, followed by intermediate certificates.
    #[schema(value_type = Option<String>)]
    pub certificate: Option<PathBuf>,
    /// A PEM file with the certificate's key, which must not be readable by everybody.
    #[schema(value_type = Option<String>)]
    pub key: Option<PathBuf>,
    /// Maximum number of TCP connections; further ones wait.
    pub remote_connections_max: u32,
    /// Names by which browsers reach the Unix socket through a reverse proxy; requests for other names are refused.
    pub hosts: Vec<String>,
}

/// Settings of the NBD address, at which clients read VDIs and snapshots.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default, rename_all = "kebab-case", deny_unknown_fields)]
pub struct Nbd {
    /// Addresses at which NBD is also served over TCP, with TLS and tokens; none if not set.
    #[schema(value_type = Vec<String>)]
    pub listen: Vec<SocketAddr>,
    /// Maximum number of connections; further ones wait.
    pub connections_max: u32,
}

/// Settings of plugging.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default, rename_all = "kebab-case", deny_unknown_fields)]
pub struct Plug {
    /// VBDs of one VM that are plugged or unplugged at the same time.
    pub plug_window: u32,
    /// VBDs of the host that are plugged or unplugged at the same time.
    pub worker_pool_size: u32,
    /// Bytes of memory that these operations may need in total.
    pub worker_memory: u64,
    /// Seconds that one step of a plug or unplug may take.
    pub step_timeout: u32,
    /// A group whose members may connect to the sockets of disks; if not set, only root and the daemon's own user may.
    pub socket_group: Option<String>,
    /// Threads that a disk process may use, 1 to 16: more than one while that is saturated and processors are idle.
    pub disk_threads: usize,
    /// The processors that disk processes run on, as in `0-3,8`; if not set, those of `disk-numa-node`, or else all.
    pub disk_cpus: Option<String>,
    /// The NUMA node on whose processors disk processes run, unless `disk-cpus` names others, and whose memory they
    /// prefer.
    pub disk_numa_node: Option<u32>,
    /// Whether plugged disks of a repository share its storage by their weights.
    pub shares: bool,
    /// For tests of slow storage: plug operations on a VDI whose name ends with a number of milliseconds, as in
    /// `disk~250ms`, take that much longer.
    pub injected_delays: bool,
}

/// What is started with the host, besides objects with `autostart`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default, rename_all = "kebab-case", deny_unknown_fields)]
pub struct Autostart {
    /// Whether disks of machines that are managed elsewhere are plugged again if they were plugged when the host went
    /// down.
    pub plugged: bool,
    /// Seconds before a failed start is retried.
    pub retry_after: u32,
}

/// Settings of the log.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default, rename_all = "kebab-case", deny_unknown_fields)]
pub struct Log {
    /// The log level: `error`, `warn`, `info`, `debug`, or a `tracing` filter: `info,taplined::plug=debug`.
    pub level: String,
    /// The destination: a file in the log directory, or standard error, which systemd stores.
    pub to: LogTo,
    /// Bytes after which a new file is started.
    pub file_size: u64,
    /// Number of old files to keep.
    pub files: u32,
}

/// The destination of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum LogTo {
    /// Standard error, as text.
    Stderr,
    /// `taplined.log` in the log directory, one JSON object per line.
    File,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            state_directory: "/var/lib/tapline".into(),
            suspended_directory: None,
            run_directory: "/run/tapline".into(),
            log_directory: "/var/log/tapline".into(),
            disk_program: None,
            disk_user: None,
            disk_user_range: "66000-81999".into(),
            qemu_user: None,
            qemu_user_range: "82000-97999".into(),
            disk_oom_score_adj: -500,
            upgrade_pause_max: 50,
            qemu_program: "qemu-system-x86_64".into(),
            xl_program: "xl".into(),
            api: Api::default(),
            nbd: Nbd::default(),
            plug: Plug::default(),
            storage: Storage::default(),
            autostart: Autostart::default(),
            catalogue: CatalogueCopies::default(),
            log: Log::default(),
        }
    }
}

impl Default for Api {
    fn default() -> Api {
        Api {
            group: None,
            connections_max: 1100,
            listen: Vec::new(),
            certificate: None,
            key: None,
            remote_connections_max: 200,
            hosts: Vec::new(),
        }
    }
}

impl Default for Nbd {
    fn default() -> Nbd {
        Nbd { listen: Vec::new(), connections_max: 64 }
    }
}

impl Default for Plug {
    fn default() -> Plug {
        Plug {
            plug_window: 10,
            worker_pool_size: 32,
            worker_memory: 512 << 20,
            step_timeout: 300,
            socket_group: None,
            disk_threads: 1,
            disk_cpus: None,
            disk_numa_node: None,
            shares: true,
            injected_delays: false,
        }
    }
}

impl Storage {
    /// How long storage may take to respond.
    pub fn patience(&self) -> Duration {
        Duration::from_secs(self.answer_timeout.into())
    }
}

impl Default for Storage {
    fn default() -> Storage {
        Storage { answer_timeout: 30, lost_interval: 60, measure_interval: 30, full_interval: 5 }
    }
}

impl Default for Autostart {
    fn default() -> Autostart {
        Autostart { plugged: false, retry_after: 20 }
    }
}

impl Default for Log {
    fn default() -> Log {
        Log { level: "info".into(), to: LogTo::Stderr, file_size: 16 << 20, files: 4 }
    }
}

impl Config {
    /// Reads a configuration file.
    pub fn read(path: &Path) -> Result<Config, Problem> {
        let tried = format!("read the configuration {}", path.display());
        let text = std::fs::read_to_string(path).map_err(|error| Problem::failed(&tried, error))?;
        Config::parse(&text).map_err(|why| Problem::new(Code::Invalid, format!("cannot {tried}: {why}")))
    }

    /// The directory of the directories of all machines.
    pub fn vm_directories(&self) -> PathBuf {
        self.run_directory.join("vm")
    }

    fn parse(text: &str) -> Result<Config, String> {
        let config: Config = toml::from_str(text).map_err(|error| error.to_string())?;
        config.check().map(|()| config)
    }

    fn check(&self) -> Result<(), String> {
        let at_least_one = [
            ("upgrade-pause-max", u64::from(self.upgrade_pause_max)),
            ("plug.plug-window", u64::from(self.plug.plug_window)),
            ("plug.worker-pool-size", u64::from(self.plug.worker_pool_size)),
            ("plug.worker-memory", self.plug.worker_memory),
            ("plug.step-timeout", u64::from(self.plug.step_timeout)),
            ("api.connections-max", u64::from(self.api.connections_max)),
            ("api.remote-connections-max", u64::from(self.api.remote_connections_max)),
            ("storage.answer-timeout", u64::from(self.storage.answer_timeout)),
            ("storage.lost-interval", u64::from(self.storage.lost_interval)),
            ("storage.measure-interval", u64::from(self.storage.measure_interval)),
            ("storage.full-interval", u64::from(self.storage.full_interval)),
            ("autostart.retry-after", u64::from(self.autostart.retry_after)),
            ("catalogue.backups", u64::from(self.catalogue.backups)),
            ("catalogue.backup-interval", u64::from(self.catalogue.backup_interval)),
            ("log.file-size", self.log.file_size),
        ];
        if let Some((name, _)) = at_least_one.iter().find(|(_, value)| *value == 0) {
            return Err(format!("{name} must be at least 1"));
        }
        if !(-1000..=1000).contains(&self.disk_oom_score_adj) {
            return Err("disk-oom-score-adj must be -1000 to 1000".into());
        }
        if !(1..=THREADS_MAX).contains(&self.plug.disk_threads) {
            return Err(format!("plug.disk-threads must be 1 to {THREADS_MAX}"));
        }
        if let Some(Err(why)) = self.plug.disk_cpus.as_ref().map(|list| list.parse::<CpuList>()) {
            return Err(format!("plug.disk-cpus: {why}"));
        }
        let range = |setting, text| Range::parse(text).map_err(|why| format!("{setting}: {why}"));
        let of_disks = range("disk-user-range", &self.disk_user_range)?;
        if range("qemu-user-range", &self.qemu_user_range)?.meets(of_disks) {
            return Err("qemu-user-range and disk-user-range overlap".into());
        }
        let (certificate, key) = (&self.api.certificate, &self.api.key);
        if certificate.is_some() != key.is_some() {
            return Err("api.certificate and api.key must be set together".into());
        }
        if !self.api.listen.is_empty() && certificate.is_none() {
            return Err("api.listen: the API over TCP requires TLS: set api.certificate and api.key too".into());
        }
        if !self.nbd.listen.is_empty() && certificate.is_none() {
            return Err("nbd.listen: NBD over TCP requires TLS: set api.certificate and api.key too".into());
        }
        if let Some(host) = self.api.hosts.iter().find(|host| host.is_empty() || host.contains([':', '/', '*'])) {
            return Err(format!("api.hosts: '{host}' is not a host name; write names without scheme, port or path"));
        }
        let paths = [
            ("state-directory", Some(&self.state_directory)),
            ("suspended-directory", self.suspended_directory.as_ref()),
            ("run-directory", Some(&self.run_directory)),
            ("log-directory", Some(&self.log_directory)),
            ("api.certificate", certificate.as_ref()),
            ("api.key", key.as_ref()),
        ];
        match paths.iter().find_map(|(name, path)| path.filter(|path| !path.is_absolute()).map(|path| (name, path))) {
            Some((name, path)) => Err(format!("{name} is not absolute: {}", path.display())),
            None => Ok(()),
        }
    }

    /// The socket of the API.
    pub fn socket(&self) -> PathBuf {
        self.run_directory.join("taplined.sock")
    }

    /// The socket at which VDIs and snapshots are read over NBD.
    pub fn nbd_socket(&self) -> PathBuf {
        self.run_directory.join("nbd.sock")
    }

    /// The file of the catalogue.
    pub fn catalogue(&self) -> PathBuf {
        self.state_directory.join("catalogue.db")
    }

    /// The directory of the catalogue's backups.
    pub fn backups(&self) -> PathBuf {
        self.state_directory.join("backups")
    }

    /// The limits on concurrent work.
    pub fn limits(&self) -> Limits {
        Limits {
            plug_window: self.plug.plug_window,
            worker_pool_size: self.plug.worker_pool_size,
            worker_memory: self.plug.worker_memory,
        }
    }
}

/// The JSON schema of the configuration.
pub fn schema_text() -> Result<String, Problem> {
    let mut parts = Vec::new();
    Config::schemas(&mut parts);
    let mut schema =
        serde_json::to_value(Config::schema()).map_err(|error| Problem::failed("encode the schema", error))?;
    if let Some(root) = schema.as_object_mut() {
        root.insert("$schema".into(), "https://json-schema.org/draft/2020-12/schema".into());
        root.insert(
            "components".into(),
            serde_json::json!({ "schemas": parts.into_iter().collect::<std::collections::BTreeMap<_, _>>() }),
        );
    }
    let text = serde_json::to_string_pretty(&schema).map_err(|error| Problem::failed("encode the schema", error))?;
    Ok(format!("{text}\n"))
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn an_empty_file_is_all_defaults() {
        assert_eq!(Config::parse("").unwrap(), Config::default());
    }

    #[test]
    fn unknown_and_invalid_settings_are_refused_by_name() {
        assert!(Config::parse("[plug]\nplug-windo = 1").unwrap_err().contains("plug-windo"));
        assert!(Config::parse("[plug]\nplug-window = 0").unwrap_err().contains("plug-window"));
        assert!(Config::parse("[plug]\ndisk-threads = 0").unwrap_err().contains("disk-threads must be 1 to 16"));
        assert!(Config::parse("[plug]\ndisk-cpus = \"3-1\"").unwrap_err().contains("disk-cpus: '3-1' is no list"));
        assert!(Config::parse("run-directory = \"run\"").unwrap_err().contains("run-directory"));
        assert!(Config::parse("disk-oom-score-adj = 1001").unwrap_err().contains("disk-oom-score-adj"));
        assert!(Config::parse("disk-user-range = \"0-9\"").unwrap_err().contains("disk-user-range"));
        assert!(Config::parse("qemu-user-range = \"66001-66002\"").unwrap_err().contains("overlap"));
        assert!(Config::parse("[api]\nlisten = [\"alpha:7443\"]").unwrap_err().contains("listen"));
        assert!(
            Config::parse("[api]\nhosts = [\"a.example\", \"b.example:8443\"]").unwrap_err().contains("b.example:8443")
        );
    }

    #[test]
    fn tcp_without_tls_is_refused() {
        let plain = Config::parse("[api]\nlisten = [\"127.0.0.1:7443\"]").unwrap_err();
        assert!(plain.contains("requires TLS") && plain.contains("api.certificate"), "{plain}");
        let files = "certificate = \"/a.pem\"\nkey = \"/b.pem\"";
        assert!(Config::parse(&format!("[api]\nlisten = [\"[::]:7443\"]\n{files}")).is_ok());
        assert!(Config::parse("[api]\nkey = \"/b.pem\"").unwrap_err().contains("api.certificate"));
        assert!(Config::parse(&format!("[api]\n{}", files.replace("/a", "a"))).unwrap_err().contains("a.pem"));
    }

    #[test]
    fn the_documented_file_is_the_defaults() {
        let text = include_str!("../../docs/taplined.toml");
        assert_eq!(Config::parse(text).unwrap(), Config::default());
        // Settings that are commented out because they have no default count too.
        let set: String = text
            .lines()
            .map(|line| line.strip_prefix("#= ").unwrap_or(line))
            .fold(String::new(), |all, line| all + line + "\n");
        Config::parse(&set).unwrap();
        for name in [
            "state-directory",
            "disk-program",
            "disk-user",
            "disk-user-range",
            "qemu-user",
            "qemu-user-range",
            "qemu-program",
            "xl-program",
            "group",
            "connections-max",
            "listen",
            "certificate",
            "key",
            "remote-connections-max",
            "hosts",
            "step-timeout",
            "lost-interval",
            "backups",
            "backup-interval",
            "file-size",
        ] {
            assert!(set.contains(&format!("{name} = ")), "{name}");
        }
    }
}
