//! The `xl` configuration of a domain: without disks, which are plugged before it runs.
//!
//! Invariant: untrusted text is a value and never anything else; text that xl's syntax cannot express is rejected.

use std::collections::BTreeMap;
use std::path::PathBuf;

use thiserror::Error;

use crate::syntax::xl_value;

/// MiB of memory that a domain has at most: what xl counts in KiB as 32 bits.
const MEMORY_MIB_MAX: u64 = 4 << 20;

/// Processors of a PV or PVH guest at most, as Xen counts them.
const VCPUS_MAX: u32 = 128;

/// The configuration of a domain, to be written for xl.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Its identity, which is its name as well: two domains cannot have one name.
    pub uuid: String,
    /// Its memory.
    pub memory_mib: u64,
    /// Its processors.
    pub vcpus: u32,
    /// The kernel, which xl loads itself.
    pub kernel: PathBuf,
    /// The kernel's first file system.
    pub initrd: Option<PathBuf>,
    /// The kernel's command line.
    pub command_line: String,
    /// Other settings.
    pub platform: Platform,
}

/// The optional settings, by their users' names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Platform {
    kind: Kind,
    clock: Option<Clock>,
}

/// How a guest is virtualised. One of HVM would read its boot disk through QEMU, which knows nothing of ours.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Kind {
    #[default]
    Pvh,
    Pv,
}

/// How a guest reads the processor's clock (xl.cfg(5), `tsc_mode`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Clock {
    Default,
    AlwaysEmulate,
    Native,
}

/// Why there can be no such domain.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum ConfigError {
    /// An unknown key.
    #[error("platform: the xen driver does not know '{key}'; it supports `type` and `tsc_mode`")]
    Unknown {
        /// The key.
        key: String,
    },
    /// A value that means nothing.
    #[error("platform: {key} must be one of {values}, not '{value}'")]
    Value {
        /// The key.
        key: &'static str,
        /// The given value.
        value: String,
        /// The allowed values.
        values: &'static str,
    },
    /// A number that is too small or too large.
    #[error("a Xen guest must have {what}, not {given}")]
    Range {
        /// The field of it.
        field: &'static str,
        /// The allowed values.
        what: String,
        /// The given value.
        given: u64,
    },
    /// Text that xl's syntax cannot express.
    #[error(
        "{field} cannot be passed to xl, whose configuration cannot express an apostrophe, a backslash or a line break"
    )]
    Word {
        /// The field that contains it.
        field: &'static str,
    },
}

impl Platform {
    /// Parses the requested platform.
    pub fn parse(asked: &BTreeMap<String, String>) -> Result<Platform, ConfigError> {
        let mut platform = Platform::default();
        for (key, value) in asked {
            let refused = |key, values| ConfigError::Value { key, value: value.clone(), values };
            match key.as_str() {
                "type" => {
                    platform.kind = match value.as_str() {
                        "pvh" => Kind::Pvh,
                        "pv" => Kind::Pv,
                        _ => return Err(refused("type", "pvh, pv")),
                    }
                }
                // XenServer's users know the numbers.
                "tsc_mode" => {
                    platform.clock = Some(match value.as_str() {
                        "default" | "0" => Clock::Default,
                        "always_emulate" | "1" => Clock::AlwaysEmulate,
                        "native" | "2" => Clock::Native,
                        _ => return Err(refused("tsc_mode", "default, always_emulate, native, or 0 to 2")),
                    });
                }
                _ => return Err(ConfigError::Unknown { key: key.clone() }),
            }
        }
        Ok(platform)
    }
}

impl Config {
    /// The text for `xl create`. After a power-off, reboot or crash of the guest the domain is kept, so that the daemon
    /// can see which it was.
    pub fn text(&self) -> Result<String, ConfigError> {
        self.check()?;
        let kind = match self.platform.kind {
            Kind::Pvh => "pvh",
            Kind::Pv => "pv",
        };
        let mut lines = vec![
            format!("name={}", quoted("the name", &self.uuid)?),
            format!("uuid={}", quoted("the UUID", &self.uuid)?),
            format!("type='{kind}'"),
            format!("memory={}", self.memory_mib),
            format!("vcpus={}", self.vcpus),
            format!("kernel={}", quoted("the kernel", &self.kernel.to_string_lossy())?),
        ];
        if let Some(initrd) = &self.initrd {
            lines.push(format!("ramdisk={}", quoted("the initrd", &initrd.to_string_lossy())?));
        }
        if !self.command_line.is_empty() {
            lines.push(format!("extra={}", quoted("the command line", &self.command_line)?));
        }
        if let Some(clock) = self.platform.clock {
            let clock = match clock {
                Clock::Default => "default",
                Clock::AlwaysEmulate => "always_emulate",
                Clock::Native => "native",
            };
            lines.push(format!("tsc_mode='{clock}'"));
        }
        lines
            .extend(["on_poweroff", "on_reboot", "on_crash", "on_watchdog"].map(|event| format!("{event}='preserve'")));
        lines.extend(["disk=[]".to_owned(), "vif=[]".to_owned(), String::new()]);
        Ok(lines.join("\n"))
    }

    fn check(&self) -> Result<(), ConfigError> {
        if !(1..=MEMORY_MIB_MAX).contains(&self.memory_mib) {
            let what = format!("1 to {MEMORY_MIB_MAX} MiB of memory");
            return Err(ConfigError::Range { field: "memory", what, given: self.memory_mib });
        }
        if !(1..=VCPUS_MAX).contains(&self.vcpus) {
            let what = format!("1 to {VCPUS_MAX} processors");
            return Err(ConfigError::Range { field: "vcpus", what, given: self.vcpus.into() });
        }
        Ok(())
    }
}

/// A string of xl's configuration. A backslash there begins an escape (libxlu_cfg.c).
fn quoted(field: &'static str, word: &str) -> Result<String, ConfigError> {
    let plain = xl_value(word).filter(|word| !word.contains(['\\', '\r']));
    plain.map(|word| format!("'{word}'")).ok_or(ConfigError::Word { field })
}

#[cfg(test)]
mod test {
    use super::*;

    fn config() -> Config {
        Config {
            uuid: "9b1deb4d-3b7d-4bad-9bdd-2b0d7b3dcb6d".into(),
            memory_mib: 320,
            vcpus: 2,
            kernel: "/boot/vm linux".into(),
            initrd: Some("/boot/initrd".into()),
            command_line: "console=hvc0 name=\"x\"".into(),
            platform: Platform::default(),
        }
    }

    fn platform(key: &str, value: &str) -> Result<Platform, ConfigError> {
        Platform::parse(&BTreeMap::from([(key.to_owned(), value.to_owned())]))
    }

    #[test]
    fn the_xl_configuration_has_everything_but_disks() {
        let config = Config { platform: platform("tsc_mode", "2").unwrap(), ..config() };
        let text = config.text().unwrap();
        for line in [
            "name='9b1deb4d-3b7d-4bad-9bdd-2b0d7b3dcb6d'",
            "uuid='9b1deb4d-3b7d-4bad-9bdd-2b0d7b3dcb6d'",
            "type='pvh'",
            "memory=320",
            "vcpus=2",
            "kernel='/boot/vm linux'",
            "ramdisk='/boot/initrd'",
            "extra='console=hvc0 name=\"x\"'",
            "tsc_mode='native'",
            "on_reboot='preserve'",
            "disk=[]",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}: {text}");
        }
    }

    #[test]
    fn values_cannot_inject_configuration() {
        for odd in ["a'\nname='b", "it's", "a\\x27b", "a\rb"] {
            let refused = Config { command_line: odd.into(), ..config() }.text();
            assert_eq!(refused.unwrap_err(), ConfigError::Word { field: "the command line" }, "{odd:?}");
        }
    }

    #[test]
    fn invalid_values_are_refused_by_name() {
        assert_eq!(platform("usb", "true").unwrap_err(), ConfigError::Unknown { key: "usb".into() });
        assert!(platform("type", "hvm").unwrap_err().to_string().contains("one of pvh, pv, not 'hvm'"));
        assert!(Config { memory_mib: 0, ..config() }.text().is_err());
        assert!(Config { vcpus: 129, ..config() }.text().is_err());
        assert_eq!(platform("type", "pv").unwrap().kind, Kind::Pv);
    }
}
