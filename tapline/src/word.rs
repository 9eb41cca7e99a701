//! Parses command-line arguments into values of the API.
//!
//! The API's types check the values; the words for states and kinds are those of its JSON.

use api::{AbsolutePath, Autostart, LogicalBlockSize, Problem, SrSource};
use clap::ArgGroup;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use control::size;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// The image formats.
pub const FORMATS: [&str; 3] = ["raw", "vhd", "qcow2"];
/// The formats of files that can be imported.
pub const SOURCE_FORMATS: [&str; 5] = ["raw", "vhd", "qcow2", "vmdk", "vhdx"];
/// The transports of disks.
pub const TRANSPORTS: [&str; 3] = ["vhost-user", "nbd", "blkif"];
/// The access modes of block devices.
pub const MODES: [&str; 2] = ["RW", "RO"];
/// The drivers of machines.
pub const DRIVERS: [&str; 2] = ["qemu", "xen"];

/// The kinds of objects.
pub const KINDS: [&str; 6] = ["host", "sr", "vdi", "vbd", "vm", "task"];

/// A parser of a few words into values that have these names in JSON.
pub fn one_of<T: DeserializeOwned + Clone + Send + Sync + 'static>(
    words: &'static [&'static str],
) -> impl TypedValueParser<Value = T> {
    PossibleValuesParser::new(words).try_map(|word| serde_json::from_value::<T>(Value::String(word)))
}

/// A parser of the logical block sizes.
pub fn block_size() -> impl TypedValueParser<Value = LogicalBlockSize> {
    PossibleValuesParser::new(["512", "4096"]).try_map(|bytes| bytes.parse::<LogicalBlockSize>())
}

/// The options of a verb that changes an object; at least one is required.
pub fn changes(options: &'static [&'static str]) -> ArgGroup {
    ArgGroup::new("change").required(true).multiple(true).args(options)
}

/// The name of a value in JSON.
pub fn of(value: &impl Serialize) -> String {
    match serde_json::to_value(value) {
        Ok(Value::String(word)) => word,
        Ok(other) => other.to_string(),
        Err(error) => error.to_string(),
    }
}

/// Formats a value as a line of JSON.
pub fn json(value: &impl Serialize) -> Result<String, Problem> {
    serde_json::to_string(value).map_err(|error| Problem::failed("print JSON", error))
}

/// Parses the size of a disk or of memory: `10G`.
pub fn size(word: &str) -> Result<api::Size, String> {
    let bytes = bytes(word)?;
    bytes.try_into().map_err(|why: String| match word.bytes().all(|digit| digit.is_ascii_digit()) && bytes > 0 {
        true => format!("{why}; {word}G is {word} GiB"),
        false => why,
    })
}

/// Parses the size of a machine's memory. A bare number is bytes here, but MiB in other programs; one too small for a
/// memory size in bytes is refused.
pub fn memory(word: &str) -> Result<api::Size, String> {
    let is_bare = !word.is_empty() && word.bytes().all(|digit| digit.is_ascii_digit());
    if is_bare && word.parse::<u64>().is_ok_and(|bytes| (1..1 << 20).contains(&bytes)) {
        return Err(format!("a number without a unit is bytes; {word}M is {word} MiB, {word}G is {word} GiB"));
    }
    size(word)
}

/// Parses the filter of a list: a name or UUID prefix. A field in the syntax of `xe`, such as `sr=local`, is refused
/// with the equivalent command.
pub fn listed(noun: &'static str) -> impl Fn(&str) -> Result<String, String> + Clone {
    move |word| {
        let Some((field, value)) = word.split_once('=') else { return Ok(word.into()) };
        let option = match (noun, field) {
            (_, "uuid") => return Err(format!("use 'tapline {noun} show {value}'")),
            (_, "name-label" | "name") => return Err(format!("a name needs no field: 'tapline {noun} list {value}'")),
            (_, "params") => return Err(format!("use 'tapline {noun} list --wide', or --json")),
            (_, "tags" | "tag") => "tag",
            ("vdi", "sr" | "sr-uuid" | "sr-name-label") => "sr",
            ("vbd", "vm" | "vm-uuid" | "vm-name-label") => "vm",
            ("vbd", "vdi" | "vdi-uuid" | "vdi-name-label") => "vdi",
            _ => return Ok(word.into()),
        };
        Err(format!("use 'tapline {noun} list --{option} {value}'"))
    }
}

/// Parses a number of bytes: `10G`, or 0.
pub fn bytes(word: &str) -> Result<u64, String> {
    word.parse().map(|size::Size(bytes)| bytes).map_err(|error: size::NotASize| error.to_string())
}

/// A path on the daemon's host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostPath {
    /// The path as typed.
    pub typed: String,
    /// The absolute path: the daemon has another working directory.
    pub whole: AbsolutePath,
    /// Whether the path is relative to the current directory.
    pub relative: bool,
}

/// Parses a path on the daemon's host; [`Session::path`](crate::session::Session::path) refuses relative ones if the
/// daemon is remote.
pub fn path(word: &str) -> Result<HostPath, String> {
    if let Some((scheme, _)) = word.split_once("://") {
        let name = word.rsplit('/').next().unwrap_or_default();
        return Err(match scheme {
            "http" | "https" | "ftp" => {
                format!("'{word}' is a URL; download it first: curl -fLO {word}; then give {name}")
            }
            _ => format!("'{word}' is a URL, and this must be a path on the daemon's host"),
        });
    }
    let whole = std::path::absolute(word).map_err(|error| format!("'{word}': {error}"))?;
    let whole = whole.to_str().ok_or_else(|| format!("'{word}' is not UTF-8"))?.parse()?;
    Ok(HostPath { typed: word.into(), whole, relative: !word.starts_with('/') })
}

/// An image file that is imported or exported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ImageFile {
    /// The standard input or output of this command.
    Standard,
    /// A file on the daemon's host.
    Host(HostPath),
}

/// Parses the path of an image file that the daemon reads or writes, or `-` for a standard stream of this command.
pub fn image_file(word: &str) -> Result<ImageFile, String> {
    match word {
        "-" => Ok(ImageFile::Standard),
        _ => path(word).map(ImageFile::Host),
    }
}

/// Parses a directory on the daemon's host; network storage is refused with the option to use.
pub fn directory(word: &str) -> Result<HostPath, String> {
    if nfs(word).is_ok() && !word.starts_with('/') {
        return Err(format!("'{word}' is a directory of an NFS server: use --nfs {word}"));
    }
    if smb(word).is_ok() {
        return Err(format!("'{word}' is a share of an SMB server: use --smb {word} --credentials FILE"));
    }
    path(word)
}

/// Parses `SERVER:/EXPORT`, as in mount(8); the server may be an IPv6 address in brackets.
pub fn nfs(word: &str) -> Result<SrSource, String> {
    let wrong = || format!("'{word}' is not SERVER:/EXPORT, as in nas:/srv/vms");
    let (server, export) = word.split_once(":/").ok_or_else(wrong)?;
    if server.is_empty() {
        return Err(wrong());
    }
    Ok(SrSource::Nfs { server: server.into(), export: format!("/{export}").parse()?, version: None })
}

/// An SMB share and its server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Share {
    /// The name or address of the server.
    pub server: String,
    /// The name of the share, optionally with a directory in it.
    pub share: String,
}

/// Parses `//SERVER/SHARE`, as in mount.cifs(8).
pub fn smb(word: &str) -> Result<Share, String> {
    let parts = word.strip_prefix("//").and_then(|rest| rest.split_once('/'));
    let named = parts.filter(|(server, share)| !server.is_empty() && !share.is_empty());
    let (server, share) = named.ok_or_else(|| format!("'{word}' is not //SERVER/SHARE, as in //nas/vms"))?;
    Ok(Share { server: server.into(), share: share.into() })
}

/// Parses `KEY=VALUE`.
pub fn pair(word: &str) -> Result<(String, String), String> {
    let (key, value) = word.split_once('=').ok_or_else(|| format!("'{word}' is not KEY=VALUE, as in usb=true"))?;
    Ok((key.into(), value.into()))
}

/// The syntax of `--autostart`.
pub const AUTOSTART: &str = "order=N,delay=SECONDS,tries=N";

/// Parses `order=1,delay=30,tries=5`; each part is optional.
pub fn autostart(word: &str) -> Result<Autostart, String> {
    let mut fields = serde_json::Map::new();
    for pair in word.split(',').filter(|pair| !pair.is_empty()) {
        let (key, value) = pair.split_once('=').ok_or_else(|| format!("'{pair}' is not KEY=N, as in order=1"))?;
        let number: u32 = value.parse().map_err(|_| format!("'{value}' is not a valid number"))?;
        fields.insert(key.into(), number.into());
    }
    serde_json::from_value(fields.into()).map_err(|error| error.to_string())
}

/// Formats the settings in the syntax of [`autostart`].
pub fn of_autostart(autostart: &Autostart) -> String {
    let Autostart { order, delay, tries } = autostart;
    format!("order={order},delay={delay},tries={tries}")
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn memory_without_a_unit_is_refused_with_two_units() {
        assert_eq!(memory("1G").unwrap(), api::Size::try_from(1 << 30).unwrap());
        assert_eq!(memory("1073741824").unwrap(), api::Size::try_from(1 << 30).unwrap());
        assert_eq!(memory("128").unwrap_err(), "a number without a unit is bytes; 128M is 128 MiB, 128G is 128 GiB");
        assert!(memory("0").is_err() && memory("").is_err());
    }

    #[test]
    fn a_field_of_xe_is_refused_and_a_name_with_an_equals_sign_is_not() {
        assert_eq!(listed("vdi")("sr=local").unwrap_err(), "use 'tapline vdi list --sr local'");
        assert_eq!(listed("vm")("uuid=1234").unwrap_err(), "use 'tapline vm show 1234'");
        assert_eq!(listed("vm")("sr=local").unwrap(), "sr=local", "a machine has no repository");
        assert_eq!(listed("vdi")("a=b").unwrap(), "a=b");
    }

    #[test]
    fn autostart_is_one_argument() {
        assert_eq!(autostart("").unwrap(), Autostart::default());
        let asked = autostart("order=2,delay=30").unwrap();
        assert_eq!(of_autostart(&asked), "order=2,delay=30,tries=5");
        assert_eq!(autostart(&of_autostart(&asked)).unwrap(), asked);
        for wrong in ["2", "order", "order=a", "order=-1", "delay=3601", "tries=0", "up=30"] {
            assert!(autostart(wrong).is_err(), "{wrong}");
        }
    }

    fn all_mean_something<T: DeserializeOwned + Serialize>(words: &[&str]) {
        for word in words {
            let value: T = serde_json::from_value(Value::String((*word).into())).unwrap();
            assert_eq!(of(&value), *word);
        }
    }

    #[test]
    fn the_words_are_those_of_the_api() {
        all_mean_something::<api::ImageFormat>(&FORMATS);
        all_mean_something::<api::SourceFormat>(&SOURCE_FORMATS);
        all_mean_something::<api::Transport>(&TRANSPORTS);
        all_mean_something::<api::Driver>(&DRIVERS);
        all_mean_something::<api::Mode>(&MODES);
        all_mean_something::<api::ObjectKind>(&KINDS);
    }

    #[test]
    fn sizes_are_those_of_a_disk() {
        assert_eq!(size("10G").unwrap().bytes(), 10 << 30);
        assert!(size("0").is_err() && size("700").is_err() && size("10GB").is_err());
        assert_eq!(bytes("0"), Ok(0));
    }

    #[test]
    fn paths_are_made_absolute() {
        let here = std::env::current_dir().unwrap();
        let disk = path("disk.raw").unwrap();
        assert_eq!((disk.whole.as_path(), disk.relative), (here.join("disk.raw").as_path(), true));
        assert!(!path("/srv/disk.raw").unwrap().relative);
        assert!(path("/srv/../etc").is_err(), "where it leads to depends on links");
    }

    #[test]
    fn urls_and_network_storage_are_no_paths() {
        assert!(path("https://example.org/a.qcow2").unwrap_err().contains("curl -fLO"));
        assert!(directory("nas:/srv/vms").unwrap_err().contains("--nfs nas:/srv/vms"));
        assert!(directory("//nas/vms").unwrap_err().contains("--smb //nas/vms"));
        assert!(directory("/srv/vms").is_ok() && directory("/srv/a:/b").is_ok());
    }

    #[test]
    fn a_stream_is_no_file_of_the_daemon() {
        assert_eq!(image_file("-"), Ok(ImageFile::Standard));
        assert_eq!(image_file("./-"), path("./-").map(ImageFile::Host));
    }

    #[test]
    fn network_storage_is_written_as_for_mount() {
        let export = "/srv/vms".parse().unwrap();
        assert_eq!(nfs("[fe80::1]:/srv/vms"), Ok(SrSource::Nfs { server: "[fe80::1]".into(), export, version: None }));
        assert!(nfs("nas").is_err() && nfs(":/srv").is_err() && nfs("nas:srv").is_err());
        assert_eq!(smb("//nas/vms/a"), Ok(Share { server: "nas".into(), share: "vms/a".into() }));
        assert!(smb("nas/vms").is_err() && smb("//nas").is_err() && smb("///vms").is_err() && smb("//nas/").is_err());
    }
}
