//! The daemon's settings: a TOML file, every one of which has a default (docs/taplined.toml).

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use api::{Code, Limits, Problem};
use serde::{Deserialize, Serialize};
use utoipa::{PartialSchema, ToSchema};

use crate::account::Range;

/// All settings.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default, rename_all = "kebab-case", deny_unknown_fields)]
pub struct Config {
    /// What must survive a restart of the host: the catalogue.
    #[schema(value_type = String)]
    pub state_directory: PathBuf,
    /// What must survive a restart of the daemon but not of the host: sockets. Its path is short, since that of a socket
    /// has at most 107 bytes.
    #[schema(value_type = String)]
    pub run_directory: PathBuf,
    /// Where logs are written.
    #[schema(value_type = String)]
    pub log_directory: PathBuf,
    /// The program of the disk processes; beside this one or in the PATH if it is not named.
    #[schema(value_type = Option<String>)]
    pub disk_program: Option<PathBuf>,
    /// The user as whom all disk processes run, who owns nothing; not set, each has one of its own, from
    /// `disk-user-range`. Only where the daemon is root.
    pub disk_user: Option<String>,
    /// Numbers of users that are nobody: each disk process has one that no other has.
    pub disk_user_range: String,
    /// The user as whom all QEMUs run; not set, each has one of its own, from `qemu-user-range`. Only where the daemon
    /// is root.
    pub qemu_user: Option<String>,
    /// Numbers of users that are nobody: each QEMU has one that no other process has.
    pub qemu_user_range: String,
    /// How late disk processes are ended when the host has no memory left: their `oom_score_adj`, −1000 (never) to 1000 (first).
    /// A guest without its disk is worth less than one that is ended.
    pub disk_oom_score_adj: i16,
    /// Milliseconds that a guest's requests may wait when another process takes the place of its disk's: else the old one goes on.
    pub upgrade_pause_max: u32,
    /// The program of virtual machines: a path, or a name in the PATH.
    #[schema(value_type = String)]
    pub qemu_program: PathBuf,
    /// The program of Xen's toolstack, for VMs of the driver `xen`: a path, or a name in the PATH.
    #[schema(value_type = String)]
    pub xl_program: PathBuf,
    /// The API.
    pub api: Api,
    /// How VBDs are plugged.
    pub plug: Plug,
    /// How the storage of repositories is watched.
    pub storage: Storage,
    /// What is started with the host.
    pub autostart: Autostart,
    /// The catalogue.
    pub catalogue: CatalogueCopies,
    /// The log.
    pub log: Log,
}

/// How the catalogue is looked after.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default, rename_all = "kebab-case", deny_unknown_fields)]
pub struct CatalogueCopies {
    /// Days of which a backup is kept; and so many of those that somebody has asked for.
    pub backups: u32,
}

impl Default for CatalogueCopies {
    fn default() -> CatalogueCopies {
        CatalogueCopies { backups: 7 }
    }
}

/// How the storage of repositories is watched.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default, rename_all = "kebab-case", deny_unknown_fields)]
pub struct Storage {
    /// Seconds that storage may take to answer before what was asked of it fails.
    pub answer_timeout: u32,
    /// Seconds between two looks for a repository that is lost.
    pub lost_interval: u32,
    /// Seconds between two looks at how full a repository is, while a disk of it may be written.
    pub measure_interval: u32,
    /// The same while guests wait for space in it.
    pub full_interval: u32,
}

/// The API.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default, rename_all = "kebab-case", deny_unknown_fields)]
pub struct Api {
    /// A group whose members may use the API as root may; none but root and the daemon's own user if it is not set.
    pub group: Option<String>,
    /// Connections to the Unix socket at one time; one more waits.
    pub connections_max: u32,
    /// Addresses at which the API is also served over TCP, with TLS and to those who have a token: none if it is not set.
    #[schema(value_type = Vec<String>)]
    pub listen: Vec<SocketAddr>,
    /// The certificate of the daemon, and behind it those that lead to one that clients trust: a PEM file.
    #[schema(value_type = Option<String>)]
    pub certificate: Option<PathBuf>,
    /// The certificate's key: a PEM file that not everybody may read.
    #[schema(value_type = Option<String>)]
    pub key: Option<PathBuf>,
    /// Connections over TCP at one time; one more waits.
    pub remote_connections_max: u32,
}

/// How VBDs are plugged.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default, rename_all = "kebab-case", deny_unknown_fields)]
pub struct Plug {
    /// VBDs of one VM that are plugged or unplugged at one time.
    pub plug_window: u32,
    /// VBDs of the host that are plugged or unplugged at one time.
    pub worker_pool_size: u32,
    /// Bytes of memory which those may need together.
    pub worker_memory: u64,
    /// Seconds that a step of a plug or unplug may take.
    pub step_timeout: u32,
    /// A group whose members may connect to the sockets of disks; none but root and the daemon's own user if it is not set.
    pub socket_group: Option<String>,
    /// For tests of what slow storage does: each operation of a plug on a VDI whose name has this many milliseconds at its
    /// end, as in `disk~250ms`, takes so long.
    pub injected_delays: bool,
}

/// What is started with the host, beside what has `autostart` itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default, rename_all = "kebab-case", deny_unknown_fields)]
pub struct Autostart {
    /// Whether disks of machines that others manage are plugged again that were plugged when the host went down.
    pub plugged: bool,
    /// Seconds to wait before what could not be started is tried again.
    pub retry_after: u32,
}

/// The log.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default, rename_all = "kebab-case", deny_unknown_fields)]
pub struct Log {
    /// What is written: `error`, `warn`, `info`, `debug`, or as `tracing` has it: `info,taplined::plug=debug`.
    pub level: String,
    /// Where to: a file in the log directory, or standard error, which systemd keeps.
    pub to: LogTo,
    /// Bytes of a file before another one is begun.
    pub file_size: u64,
    /// Files that are kept beside the one being written.
    pub files: u32,
}

/// Where the log goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum LogTo {
    /// Standard error, as text.
    Stderr,
    /// `taplined.log` in the log directory, a JSON object a line.
    File,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            state_directory: "/var/lib/tapline".into(),
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
        }
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
            injected_delays: false,
        }
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
    /// Reads a file.
    pub fn read(path: &Path) -> Result<Config, Problem> {
        let tried = format!("read the configuration {}", path.display());
        let text = std::fs::read_to_string(path).map_err(|error| Problem::failed(&tried, error))?;
        Config::parse(&text).map_err(|why| Problem::new(Code::Invalid, format!("cannot {tried}: {why}")))
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
            ("log.file-size", self.log.file_size),
        ];
        if let Some((name, _)) = at_least_one.iter().find(|(_, value)| *value == 0) {
            return Err(format!("{name} is at least 1"));
        }
        if !(-1000..=1000).contains(&self.disk_oom_score_adj) {
            return Err("disk-oom-score-adj is -1000 to 1000".into());
        }
        let range = |setting, text| Range::parse(text).map_err(|why| format!("{setting}: {why}"));
        let of_disks = range("disk-user-range", &self.disk_user_range)?;
        if range("qemu-user-range", &self.qemu_user_range)?.meets(of_disks) {
            return Err("qemu-user-range and disk-user-range have users in common".into());
        }
        let (certificate, key) = (&self.api.certificate, &self.api.key);
        if certificate.is_some() != key.is_some() {
            return Err("api.certificate and api.key are set both or not at all".into());
        }
        if !self.api.listen.is_empty() && certificate.is_none() {
            return Err(
                "api.listen: over TCP the API is served with TLS only: set api.certificate and api.key too".into()
            );
        }
        let paths = [
            ("state-directory", Some(&self.state_directory)),
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

    /// The file of the catalogue.
    pub fn catalogue(&self) -> PathBuf {
        self.state_directory.join("catalogue.db")
    }

    /// The directory of the catalogue's backups.
    pub fn backups(&self) -> PathBuf {
        self.state_directory.join("backups")
    }

    /// What bounds the work done at one time.
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
        serde_json::to_value(Config::schema()).map_err(|error| Problem::failed("show the schema", error))?;
    if let Some(root) = schema.as_object_mut() {
        root.insert("$schema".into(), "https://json-schema.org/draft/2020-12/schema".into());
        root.insert(
            "components".into(),
            serde_json::json!({ "schemas": parts.into_iter().collect::<std::collections::BTreeMap<_, _>>() }),
        );
    }
    let text = serde_json::to_string_pretty(&schema).map_err(|error| Problem::failed("show the schema", error))?;
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
    fn settings_that_are_not_known_or_make_no_sense_are_refused_by_name() {
        assert!(Config::parse("[plug]\nplug-windo = 1").unwrap_err().contains("plug-windo"));
        assert!(Config::parse("[plug]\nplug-window = 0").unwrap_err().contains("plug-window"));
        assert!(Config::parse("run-directory = \"run\"").unwrap_err().contains("run-directory"));
        assert!(Config::parse("disk-oom-score-adj = 1001").unwrap_err().contains("disk-oom-score-adj"));
        assert!(Config::parse("disk-user-range = \"0-9\"").unwrap_err().contains("disk-user-range"));
        assert!(Config::parse("qemu-user-range = \"66001-66002\"").unwrap_err().contains("in common"));
        assert!(Config::parse("[api]\nlisten = [\"alpha:7443\"]").unwrap_err().contains("listen"));
    }

    #[test]
    fn tcp_without_tls_is_refused() {
        let plain = Config::parse("[api]\nlisten = [\"127.0.0.1:7443\"]").unwrap_err();
        assert!(plain.contains("with TLS only") && plain.contains("api.certificate"), "{plain}");
        let files = "certificate = \"/a.pem\"\nkey = \"/b.pem\"";
        assert!(Config::parse(&format!("[api]\nlisten = [\"[::]:7443\"]\n{files}")).is_ok());
        assert!(Config::parse("[api]\nkey = \"/b.pem\"").unwrap_err().contains("api.certificate"));
        assert!(Config::parse(&format!("[api]\n{}", files.replace("/a", "a"))).unwrap_err().contains("a.pem"));
    }

    #[test]
    fn the_documented_file_is_the_defaults() {
        let text = include_str!("../../docs/taplined.toml");
        assert_eq!(Config::parse(text).unwrap(), Config::default());
        // What is commented out because it is not set by default is a setting all the same.
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
            "step-timeout",
            "lost-interval",
            "backups",
            "file-size",
        ] {
            assert!(set.contains(&format!("{name} = ")), "{name}");
        }
    }
}
