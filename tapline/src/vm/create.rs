//! `vm create`: creates a machine with its disks, or nothing.

use std::collections::BTreeMap;

use api::{
    Autostart, Code, Description, Driver, FileChecksum, Name, OtherConfig, Power, Problem, Size, SourceFormat, Tags,
    VmCreate, VmShutdown,
};
use arguments::number;
use serde_json::json;
use uuid::Uuid;

use super::boot::Boot;
use super::console;
use super::devices::Devices;
use super::seed::SeedFiles;
use crate::attach::{self, ensure_vbd, import, make};
use crate::image_source::{ImageSource, Verified, format_of_url, is_url};
use crate::label::NewLabels;
use crate::output::say;
use crate::session::{Session, print};
use crate::word;

/// Arguments of `vm create`.
#[derive(clap::Args)]
pub struct Create {
    /// Name of the machine
    name: Name,
    /// Description
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    description: Description,
    /// Start it when the host boots: order, delay before the next ones in seconds, number of tries
    #[arg(long, value_name = word::AUTOSTART, value_parser = word::autostart, num_args = 0..=1, require_equals = true, default_missing_value = "")]
    autostart: Option<Autostart>,
    /// A disk, in the order in which the guest finds them: the name or UUID prefix of one that exists, NAME=SIZE for a
    /// new one, or NAME=FORMAT:FILE for a new one with the contents of an image file, also
    /// NAME=FORMAT:https://HOST/PATH, where the ending of the URL may be the format; may be given several times
    #[arg(long, value_name = "NAME[=SIZE|=FORMAT:FILE|=URL]", value_parser = disk_spec)]
    disk: Vec<DiskSpec>,
    /// The digest of a disk's image at a URL, as with 'vdi import'; may be given several times
    #[arg(long, value_name = "NAME=DIGEST|URL|auto", value_parser = checksum_of, requires = "disk")]
    checksum: Vec<(String, FileChecksum)>,
    /// Also read images over http, without TLS: anyone on the way can change what is read
    #[arg(long, requires = "disk")]
    insecure_http: bool,
    /// The repository of new disks [default: the only attached one, ISO libraries aside]
    #[arg(long, requires = "disk")]
    sr: Option<String>,
    /// Start it
    #[arg(long)]
    start: bool,
    /// Open its console once it is started
    #[arg(long, requires = "start")]
    console: bool,
    #[command(flatten)]
    labels: NewLabels,
    // Last, because the heading of the devices applies to all following options.
    #[command(flatten)]
    hardware: Hardware,
}

/// The hardware of a machine and its boot source.
#[derive(clap::Args)]
#[group(skip)]
pub struct Hardware {
    /// Memory, a multiple of 1 MiB
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true, value_parser = word::memory, default_value = "1G")]
    memory: Size,
    /// Number of processors
    #[arg(long, value_name = "N", default_value = "1", value_parser = number::<u8>(1..=255))]
    vcpus: u8,
    /// Driver that runs the machine
    #[arg(long, default_value = "qemu", value_parser = word::one_of::<Driver>(&word::DRIVERS))]
    driver: Driver,
    #[command(flatten)]
    boot: Boot,
    /// Optional hardware: usb=true, parallel=…, hvm_serial=…; for a Xen guest: type=pv, tsc_mode=…; may be given
    /// several times
    #[arg(long, value_name = "KEY=VALUE", value_parser = word::pair)]
    platform: Vec<(String, String)>,
    #[command(flatten)]
    devices: Devices,
    #[command(flatten)]
    files: SeedFiles,
}

impl Hardware {
    /// Builds the request to create a machine with this hardware.
    pub fn machine(self, session: &Session, name: Name) -> Result<VmCreate, Problem> {
        let Hardware { memory, vcpus, driver, boot, platform: keys, devices, files } = self;
        let mut platform: BTreeMap<String, String> = devices.platform(session)?;
        platform.extend(keys);
        let boot = boot.kernel(session)?.unwrap_or_default();
        Ok(VmCreate {
            uuid: None,
            name,
            description: Description::default(),
            driver,
            memory,
            vcpus,
            boot,
            platform,
            autostart: None,
            seed: files.seed()?,
            tags: Tags::default(),
            other_config: OtherConfig::default(),
        })
    }
}

/// A disk of a new machine.
#[derive(Clone, Debug, PartialEq, Eq)]
struct DiskSpec {
    name: String,
    from: DiskSource,
}

/// The source of a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
enum DiskSource {
    /// An existing disk.
    Known,
    /// A new, empty disk of this size.
    Empty(Size),
    /// A new disk with the contents of an image.
    Image(SourceFormat, ImageSource),
}

/// Parses `NAME=CHECKSUM`.
fn checksum_of(word: &str) -> Result<(String, FileChecksum), String> {
    let (name, checksum) = word.split_once('=').ok_or("use NAME=DIGEST, with the name of a disk of --disk")?;
    Ok((name.into(), checksum.parse()?))
}

/// Parses `NAME`, `NAME=SIZE`, `NAME=FORMAT:FILE`, `NAME=FORMAT:URL` or `NAME=URL`.
fn disk_spec(word: &str) -> Result<DiskSpec, String> {
    let Some((name, from)) = word.split_once('=') else {
        return match word.contains('/') {
            true => Err(format!("'{word}' is a file: use NAME=FORMAT:FILE, as in web=qcow2:{word}")),
            false => Ok(DiskSpec { name: word.into(), from: DiskSource::Known }),
        };
    };
    if from.contains('/') && !from.contains(':') {
        return Err(format!("'{from}' has no format: use {name}=FORMAT:FILE, as in {name}=qcow2:{from}"));
    }
    let from = match from.split_once(':') {
        Some(_) if is_url(from) => DiskSource::Image(format_of_url(from)?, ImageSource::parse(from)?),
        Some((format, path)) => {
            let known = serde_json::from_value(json!(format));
            let format = known.map_err(|_| format!("'{format}' is not a format; use raw, vhd, qcow2, vmdk or vhdx"))?;
            DiskSource::Image(format, ImageSource::parse(path)?)
        }
        None => DiskSource::Empty(word::size(from)?),
    };
    Ok(DiskSpec { name: name.into(), from })
}

/// Objects created so far, which are removed if a later step fails.
#[derive(Default)]
pub struct CreatedVm {
    /// The new machine.
    pub vm: Option<Uuid>,
    /// The new disks.
    pub vdis: Vec<Uuid>,
}

impl Create {
    /// Runs the verb and prints its output.
    pub async fn run(self, session: &Session) -> Result<(), Problem> {
        let (start, console) = (self.start, self.console);
        let mut made = CreatedVm::default();
        let vm = match self.make(session, &mut made).await {
            Ok(vm) => vm,
            Err(problem) => return Err(made.roll_back(session, problem).await),
        };
        // A machine whose start fails or is refused is kept, so that the user can find out why.
        let started = match start {
            true => async { session.finish(session.client.vm_start(vm).await?).await.map(drop) }.await,
            false => Ok(()),
        };
        match session.json() {
            true => session.value(&session.client.vm(vm).await?)?,
            false => print(&format!("{vm}\n"))?,
        }
        if started.is_err() {
            say("tapline: the machine was created, but does not run\n");
        }
        started?;
        if console { console::attach(session, vm).await.map(drop) } else { Ok(()) }
    }

    async fn make(self, session: &Session, made: &mut CreatedVm) -> Result<Uuid, Problem> {
        let Create { name, hardware, description, autostart, disk, checksum, insecure_http, sr, labels, .. } = self;
        check_names(&disk, &checksum)?;
        let (tags, other_config) = labels.values()?;
        let request = VmCreate { description, autostart, tags, other_config, ..hardware.machine(session, name)? };
        let vm = attach::uuid(&session.finish(session.client.vm_create(&request).await?).await?)?;
        made.vm = Some(vm);
        for DiskSpec { name, from } in disk {
            let new = match from {
                DiskSource::Known => None,
                DiskSource::Empty(size) => Some(make(session, &name, size, sr.as_deref(), None).await?),
                DiskSource::Image(format, source) => {
                    let checksum = checksum.iter().find(|(of, _)| *of == name).map(|(_, checksum)| checksum.clone());
                    // It is for those of the disks that have a URL.
                    let insecure_http = insecure_http && matches!(source, ImageSource::Url(_));
                    let verified = Verified { checksum, insecure_http };
                    Some(import(session, &name, (format, source), verified, sr.as_deref()).await?)
                }
            };
            made.vdis.extend(new);
            let vdi = match new {
                Some(vdi) => vdi,
                None => session.vdi(&name).await?,
            };
            ensure_vbd(session, vdi, Some(vm), None).await?;
        }
        Ok(vm)
    }
}

/// Refuses checksums of disks that are not made of an image.
fn check_names(disks: &[DiskSpec], checksums: &[(String, FileChecksum)]) -> Result<(), Problem> {
    let has_image = |name: &str| {
        disks.iter().any(|disk| disk.name == name && matches!(disk.from, DiskSource::Image(_, ImageSource::Url(_))))
    };
    match checksums.iter().find(|(name, _)| !has_image(name)) {
        None => Ok(()),
        Some((name, _)) => {
            let what = format!("--checksum {name}=...: there is no --disk {name}=URL");
            Err(Problem::new(Code::Invalid, what))
        }
    }
}

impl CreatedVm {
    /// Removes the objects after a failure, and returns its problem.
    pub async fn roll_back(self, session: &Session, problem: Problem) -> Problem {
        match self.remove(session).await {
            Ok(()) => problem,
            Err(also) => problem.advise(format!("what was created until then is still there: {also}")),
        }
    }

    /// Removes the objects: the machine, which is stopped first, with its block devices, then the new disks.
    pub async fn remove(self, session: &Session) -> Result<(), Problem> {
        let client = &session.client;
        if let Some(vm) = self.vm {
            if client.vm(vm).await?.power != Power::Halted {
                let request = VmShutdown { force: true, force_after: None };
                match session.finish(client.vm_shutdown(vm, &request).await?).await {
                    // It has just stopped.
                    Err(problem) if problem.code == Code::State => {}
                    ended => drop(ended?),
                }
            }
            session.finish(client.vm_destroy(vm).await?).await?;
        }
        for vdi in self.vdis {
            session.finish(client.vdi_destroy(vdi, false).await?).await?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_disk_is_a_name_with_or_without_what_it_is_made_of() {
        assert_eq!(disk_spec("root"), Ok(DiskSpec { name: "root".into(), from: DiskSource::Known }));
        assert_eq!(disk_spec("data=10G").unwrap().from, DiskSource::Empty(word::size("10G").unwrap()));
        assert!(disk_spec("/srv/a.qcow2").unwrap_err().contains("web=qcow2:/srv/a.qcow2"));
        assert!(disk_spec("web=/srv/a.qcow2").unwrap_err().contains("web=qcow2:/srv/a.qcow2"));
        assert!(disk_spec("data=much").is_err() && disk_spec("data=0").is_err());
        let file = DiskSource::Image(SourceFormat::Qcow2, ImageSource::parse("/srv/a=b.qcow2").unwrap());
        assert_eq!(disk_spec("root=qcow2:/srv/a=b.qcow2"), Ok(DiskSpec { name: "root".into(), from: file }));
        let url = DiskSource::Image(SourceFormat::Qcow2, ImageSource::parse("https://host/a.qcow2?b=c").unwrap());
        assert_eq!(disk_spec("root=https://host/a.qcow2?b=c").unwrap().from, url);
        assert_eq!(disk_spec("root=qcow2:https://host/a.qcow2?b=c").unwrap().from, url);
        assert!(disk_spec("root=https://host/a.img").unwrap_err().contains("qcow2:https://host/a.img"));
        assert!(disk_spec("root=qed:/a").unwrap_err().contains("'qed' is not a format"));
    }
}
