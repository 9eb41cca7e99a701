//! `vm import`: a machine with its disks from one archive, an OVA or one of `vm export`.
//!
//! The archive is read once, from its beginning to its end, so it may come through a pipe: each disk is sent to the
//! daemon and imported as it comes. If anything fails, what was created is removed.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;

use api::{
    Boot, Code, Description, Driver, LogicalBlockSize, Mode, Name, OtherConfig, Problem, Size, SourceFormat, Tags,
    VbdCreate, VdiCreate, VdiImport, VmCreate,
};
use uuid::Uuid;

use super::archive::{self, DESCRIPTION, DIGESTS, Machine, Member, Members};
use super::create::CreatedVm;
use super::ovf::{self, OvfDisk};
use crate::attach;
use crate::output::say;
use crate::session::{Session, print};
use crate::transfer;

/// Memory of a machine whose description has none.
const MEMORY: u64 = 1 << 30;

/// Arguments of `vm import`.
#[derive(clap::Args)]
pub struct Import {
    /// The archive, where this command runs: an OVA, or what 'vm export' has written; '-' is the standard input
    archive: String,
    /// Name of the machine; its disks are called NAME-0, NAME-1 and so on [default: the names in the archive]
    #[arg(long)]
    name: Option<Name>,
    /// The repository of its disks: its name or UUID prefix [default: the only attached one, ISO libraries aside]
    #[arg(long)]
    sr: Option<String>,
}

/// A machine that is to be created.
struct Plan {
    machine: VmCreate,
    disks: Vec<PlannedDisk>,
    /// What is not imported.
    notes: Vec<String>,
    /// Whether each member must be in the list of digests.
    needs_digests: bool,
}

/// A disk of it.
struct PlannedDisk {
    source: DiskSource,
    name: Name,
    description: Description,
    logical_block_size: Option<LogicalBlockSize>,
    position: u8,
    mode: Mode,
    bootable: Option<bool>,
    queues: Option<u16>,
    /// The new disk.
    vdi: Option<Uuid>,
}

enum DiskSource {
    Member(String, SourceFormat),
    Empty(u64),
}

/// The digests of members, as computed and as the archive has them.
#[derive(Default)]
struct Digests {
    /// SHA-256 and SHA-1.
    computed: HashMap<String, [String; 2]>,
    listed: Vec<(String, String)>,
}

impl Import {
    /// Runs the verb and prints the machine's UUID.
    pub async fn run(self, session: &Session) -> Result<(), Problem> {
        let mut made = CreatedVm::default();
        match self.make(session, &mut made).await {
            Ok(vm) if session.json() => session.value(&session.client.vm(vm).await?),
            Ok(vm) => print(&format!("{vm}\n")),
            Err(problem) => Err(made.roll_back(session, problem).await),
        }
    }

    async fn make(self, session: &Session, made: &mut CreatedVm) -> Result<Uuid, Problem> {
        let Import { archive, name, sr } = self;
        let sr = session.sr_or_only(sr.as_deref()).await?;
        let mut members = match archive.as_str() {
            "-" => Members::of(std::io::stdin()),
            path => {
                let failed = |error| Problem::failed(format_args!("open {path}"), error);
                Members::of(File::open(path).map_err(failed)?)
            }
        };
        let mut digests = Digests::default();
        let mut plan = plan(&mut members, &mut digests).await?;
        if let Some(name) = name {
            plan.rename(name)?;
        }
        names_must_be_free(session, sr, &plan).await?;
        plan.notes.iter().for_each(|note| say(&format!("tapline: {note}\n")));
        let vm = attach::uuid(&session.finish(session.client.vm_create(&plan.machine).await?).await?)?;
        made.vm = Some(vm);
        while let Some(member) = members.next().await? {
            take(session, sr, member, &mut plan, &mut digests, made).await?;
        }
        digests.compare(plan.needs_digests)?;
        for disk in &mut plan.disks {
            disk.must_be_there(session, sr, made).await?;
            connect(session, vm, disk).await?;
        }
        Ok(vm)
    }
}

/// Reads the first member, which describes the machine.
async fn plan(members: &mut Members, digests: &mut Digests) -> Result<Plan, Problem> {
    let refused = |what: String| {
        Problem::new(Code::Invalid, what).advise(
            "give an OVA, or an archive of 'tapline vm export'; a single disk is imported by 'tapline vdi import'",
        )
    };
    let Some(mut first) = members.next().await? else {
        return Err(refused("the archive is empty".into()));
    };
    let name = first.name.clone();
    let plan = match name.as_str() {
        DESCRIPTION => Plan::of_machine(&first.text().await?)?,
        name if name.to_ascii_lowercase().ends_with(".ovf") => Plan::of_ovf(&first.text().await?)?,
        _ => return Err(refused(format!("the archive begins with {name}, which describes no machine"))),
    };
    digests.computed.insert(name, first.digests());
    Ok(plan)
}

/// Imports a member that is the image of a disk, and reads one that lists digests; all others are skipped.
async fn take(
    session: &Session,
    sr: Uuid,
    mut member: Member<'_>,
    plan: &mut Plan,
    digests: &mut Digests,
    made: &mut CreatedVm,
) -> Result<(), Problem> {
    let name = member.name.clone();
    if name == DIGESTS || name.to_ascii_lowercase().ends_with(".mf") {
        digests.listed = listed(&member.text().await?);
        return Ok(());
    }
    let is_its = |disk: &&mut PlannedDisk| matches!(&disk.source, DiskSource::Member(file, _) if *file == name);
    let Some(disk) = plan.disks.iter_mut().find(is_its) else {
        say(&format!("tapline: {name} in the archive is not imported\n"));
        return Ok(());
    };
    if disk.vdi.is_some() {
        return Err(Problem::new(Code::Invalid, format!("the archive has {name} twice")));
    }
    let shown: Name = name.parse().map_err(|why| Problem::new(Code::Invalid, format!("'{name}': {why}")))?;
    let upload = transfer::upload(session, sr, shown, Some(member.size), &mut member).await?;
    digests.computed.insert(name, member.digests());
    let imported = async {
        let begun = session.client.vdi_import(&disk.import(sr, upload)).await?;
        attach::uuid(&session.finish(begun).await?)
    };
    let vdi = transfer::or_remove(session, upload, imported).await?;
    disk.vdi = Some(vdi);
    made.vdis.push(vdi);
    Ok(())
}

async fn connect(session: &Session, vm: Uuid, disk: &PlannedDisk) -> Result<(), Problem> {
    let Some(vdi) = disk.vdi else { return Ok(()) };
    let asked = VbdCreate {
        uuid: None,
        vm: Some(vm),
        vdi,
        position: Some(disk.position),
        mode: Some(disk.mode),
        bootable: disk.bootable,
        transport: None,
        queues: disk.queues,
        autostart: None,
        limits: None,
        share_weight: None,
        tags: Tags::default(),
        other_config: OtherConfig::default(),
    };
    session.finish(session.client.vbd_create(&asked).await?).await.map(drop)
}

/// Refuses names that are taken, before anything is sent.
async fn names_must_be_free(session: &Session, sr: Uuid, plan: &Plan) -> Result<(), Problem> {
    for disk in &plan.disks {
        let known = session.client.vdis(Some(sr), Some(disk.name.as_str())).await?;
        if known.iter().any(|vdi| vdi.name == disk.name) {
            let what = format!("the repository has a disk of the name '{}'", disk.name);
            return Err(Problem::new(Code::Exists, what).advise("give another name: --name NAME"));
        }
    }
    Ok(())
}

/// The request for a machine with nothing of a host.
fn halted(
    name: Name,
    description: Description,
    driver: Driver,
    memory: Size,
    vcpus: u8,
    platform: BTreeMap<String, String>,
) -> VmCreate {
    VmCreate {
        uuid: None,
        name,
        description,
        driver,
        memory,
        vcpus,
        boot: Boot::default(),
        platform,
        autostart: None,
        seed: None,
        tags: Tags::default(),
        other_config: OtherConfig::default(),
    }
}

impl Plan {
    fn of_machine(text: &str) -> Result<Plan, Problem> {
        let failed = |why: &dyn std::fmt::Display| {
            Problem::new(Code::Invalid, format!("cannot read {DESCRIPTION} in the archive: {why}"))
        };
        let read: serde_json::Value = serde_json::from_str(text).map_err(|error| failed(&error))?;
        match read.get("version").and_then(serde_json::Value::as_u64) {
            Some(version) if version == u64::from(archive::VERSION) => {}
            version => {
                let version = version.map_or_else(|| "none".to_owned(), |version| version.to_string());
                let why = format!("its version is {version}, and this tapline reads {}", archive::VERSION);
                return Err(failed(&why).advise("use the tapline of the version that has written it, or a later one"));
            }
        }
        let Machine { name, description, hardware, disks, .. } =
            serde_json::from_value(read).map_err(|error| failed(&error))?;
        let (platform, others) = archive::portable(hardware.platform);
        if !others.is_empty() {
            return Err(failed(&format!("its hardware is of a host: {}", others.join(", "))));
        }
        let machine = halted(name, description, hardware.driver, hardware.memory, hardware.vcpus, platform);
        let planned = |disk: archive::Disk| PlannedDisk {
            source: DiskSource::Member(disk.file, disk.format.into()),
            name: disk.name,
            description: disk.description,
            logical_block_size: disk.logical_block_size,
            position: disk.position,
            mode: disk.mode,
            bootable: Some(disk.bootable),
            queues: Some(disk.queues),
            vdi: None,
        };
        let disks = disks.into_iter().map(planned).collect();
        Ok(Plan { machine, disks, notes: Vec::new(), needs_digests: true })
    }

    fn of_ovf(text: &str) -> Result<Plan, Problem> {
        let found = ovf::parse(text)?;
        let wrong = |why: String| Problem::new(Code::Invalid, format!("the OVF of the archive: {why}"));
        let name: Name = found.name.as_deref().unwrap_or("imported").parse().map_err(&wrong)?;
        let memory = found.memory.unwrap_or(MEMORY).next_multiple_of(1 << 20);
        let vcpus = found.vcpus.unwrap_or(1);
        let vcpus = u8::try_from(vcpus).map_err(|_| wrong(format!("{vcpus} processors are too many")))?;
        let memory = Size::try_from(memory).map_err(&wrong)?;
        let machine = halted(name.clone(), Description::default(), Driver::Qemu, memory, vcpus, BTreeMap::default());
        let mut disks = Vec::new();
        for (position, disk) in (0..=u8::MAX - 1).zip(&found.disks) {
            let source = match disk {
                OvfDisk::File(file) => DiskSource::Member(file.clone(), format_of(file)?),
                OvfDisk::Empty(size) => DiskSource::Empty(*size),
            };
            disks.push(PlannedDisk {
                source,
                name: numbered(&name, usize::from(position))?,
                description: Description::default(),
                logical_block_size: None,
                position,
                mode: Mode::ReadWrite,
                bootable: None,
                queues: None,
                vdi: None,
            });
        }
        if disks.len() < found.disks.len() {
            return Err(wrong(format!("{} disks are too many", found.disks.len())));
        }
        let mut notes = Vec::new();
        if found.cards > 0 {
            let cards =
                if found.cards == 1 { "a network card".to_owned() } else { format!("{} network cards", found.cards) };
            notes.push(format!("the machine had {cards}: give it one with 'tapline vm set … --nic'"));
        }
        if found.is_uefi {
            notes.push(
                "the machine booted by UEFI, and boots by BIOS here: a disk without a BIOS boot loader does not".into(),
            );
        }
        Ok(Plan { machine, disks, notes, needs_digests: false })
    }

    /// Gives the machine another name, and its disks names made of that.
    fn rename(&mut self, name: Name) -> Result<(), Problem> {
        for (number, disk) in self.disks.iter_mut().enumerate() {
            disk.name = numbered(&name, number)?;
        }
        self.machine.name = name;
        Ok(())
    }
}

impl PlannedDisk {
    fn import(&self, sr: Uuid, upload: Uuid) -> VdiImport {
        let source_format = match &self.source {
            DiskSource::Member(_, format) => *format,
            DiskSource::Empty(_) => SourceFormat::Raw,
        };
        VdiImport {
            uuid: None,
            sr,
            name: self.name.clone(),
            allow_duplicate_name: false,
            description: self.description.clone(),
            path: None,
            upload: Some(upload),
            url: None,
            checksum: None,
            insecure_http: false,
            source_format,
            really_raw: false,
            logical_block_size: self.logical_block_size,
            format: None,
            tags: Tags::default(),
            other_config: OtherConfig::default(),
        }
    }

    /// Creates a disk without data; one with data must have come with the archive.
    async fn must_be_there(&mut self, session: &Session, sr: Uuid, made: &mut CreatedVm) -> Result<(), Problem> {
        let size = match (&self.source, self.vdi) {
            (_, Some(_)) => return Ok(()),
            (DiskSource::Member(file, _), None) => {
                return Err(Problem::new(Code::Invalid, format!("the archive ends without {file}")));
            }
            (DiskSource::Empty(size), None) => *size,
        };
        let wrong = |why| Problem::new(Code::Invalid, format!("the disk {}: {why}", self.name));
        let asked = VdiCreate {
            uuid: None,
            sr,
            name: self.name.clone(),
            allow_duplicate_name: false,
            description: self.description.clone(),
            size: Size::try_from(size).map_err(wrong)?,
            logical_block_size: self.logical_block_size,
            format: None,
            tags: Tags::default(),
            other_config: OtherConfig::default(),
        };
        let vdi = attach::uuid(&session.finish(session.client.vdi_create(&asked).await?).await?)?;
        made.vdis.push(vdi);
        self.vdi = Some(vdi);
        Ok(())
    }
}

impl Digests {
    /// Refuses a member that differs from its digest in the archive, and, if `all` must have one, a member without.
    fn compare(&self, all: bool) -> Result<(), Problem> {
        let is_listed = |name: &String| self.listed.iter().any(|(listed, _)| listed == name);
        if let Some(name) = self.computed.keys().find(|name| all && !is_listed(name)) {
            let what = format!("the archive ends without the digest of {name}");
            return Err(Problem::new(Code::Invalid, what).advise("copy or download the archive again"));
        }
        for (name, listed) in &self.listed {
            let Some(computed) = self.computed.get(name) else { continue };
            if !computed.contains(listed) && computed.iter().any(|digest| digest.len() == listed.len()) {
                let what = format!("{name} in the archive is damaged: its digest is not the one in the archive");
                return Err(Problem::new(Code::Invalid, what).advise("copy or download the archive again"));
            }
        }
        Ok(())
    }
}

/// The members with digests in a list, without directories as everywhere; the list is that of sha256sum(1) or of an
/// OVF (`SHA256(name)= digits`).
fn listed(text: &str) -> Vec<(String, String)> {
    let entry = |name: &str, digits: &str| {
        let name = name.trim();
        (name.rsplit('/').next().unwrap_or(name).to_owned(), digits.trim().to_ascii_lowercase())
    };
    let line = |line: &str| {
        if let Some((name, digits)) = line.split_once(")=") {
            return Some(entry(name.split_once('(')?.1, digits));
        }
        let (digits, name) = line.split_once("  ")?;
        Some(entry(name, digits))
    };
    text.lines().filter_map(line).collect()
}

fn numbered(name: &Name, number: usize) -> Result<Name, Problem> {
    let text = format!("{name}-{number}");
    text.parse().map_err(|why| Problem::new(Code::Invalid, format!("'{text}': {why}")))
}

/// The format of an image in an OVA, by its name: the description names formats by URLs, and each program
/// has its own.
fn format_of(file: &str) -> Result<SourceFormat, Problem> {
    let extension = file.rsplit_once('.').map(|(_, extension)| extension.to_ascii_lowercase()).unwrap_or_default();
    match extension.as_str() {
        "vmdk" => Ok(SourceFormat::Vmdk),
        "vhd" => Ok(SourceFormat::Vhd),
        "vhdx" => Ok(SourceFormat::Vhdx),
        "qcow2" => Ok(SourceFormat::Qcow2),
        "raw" | "img" => Ok(SourceFormat::Raw),
        _ => {
            let what = format!("the format of {file} in the archive is not known");
            Err(Problem::new(Code::Unsupported, what)
                .advise("disks must be VMDK, VHD, VHDX, qcow2 or raw, and their names must say so"))
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn digests_are_read_as_both_kinds_of_archives_have_them() {
        let expected = vec![("a.ovf".to_owned(), "0abc".to_owned()), ("b c.vmdk".into(), "12".into())];
        assert_eq!(listed("SHA256(a.ovf)= 0ABC\nSHA1(disks/b c.vmdk)= 12\n"), expected);
        assert_eq!(listed("0abc  a.ovf\n12  b c.vmdk\n"), expected);
    }

    #[test]
    fn a_damaged_member_is_found() {
        let of = |digits: &str| [digits.repeat(64), digits.repeat(40)];
        let computed = HashMap::from([("a".to_owned(), of("1"))]);
        let digests = |listed: &str| Digests { computed: computed.clone(), listed: vec![("a".into(), listed.into())] };
        assert!(digests(&"1".repeat(64)).compare(true).is_ok() && digests(&"1".repeat(40)).compare(true).is_ok());
        assert!(digests(&"2".repeat(64)).compare(true).unwrap_err().detail.contains("a in the archive is damaged"));
        // Of another kind: not compared.
        assert!(digests(&"2".repeat(128)).compare(true).is_ok());
        let unlisted = Digests { computed: computed.clone(), listed: Vec::new() };
        assert!(unlisted.compare(false).is_ok() && unlisted.compare(true).is_err());
    }

    #[test]
    fn an_archive_of_a_later_version_is_refused() {
        let problem = Plan::of_machine(r#"{"format":"tapline-vm","version":2}"#).err().unwrap();
        assert!(problem.detail.contains("its version is 2"), "{problem}");
    }

    #[test]
    fn an_archive_gets_nothing_of_the_host() {
        let of = |platform: &str| {
            let hardware = format!(r#"{{"driver":"qemu","memory":1073741824,"vcpus":1,"platform":{platform}}}"#);
            let text = format!(
                r#"{{"format":"tapline-vm","version":1,"name":"a","description":"","hardware":{hardware},"disks":[],"autostart":{{}}}}"#
            );
            Plan::of_machine(&text)
        };
        assert!(of(r#"{"usb":"true"}"#).is_ok_and(|plan| plan.machine.autostart.is_none()));
        let problem = of(r#"{"hvm_serial":"file:/etc/cron.d/a"}"#).err().unwrap();
        assert!(problem.detail.contains("hvm_serial"), "{problem}");
    }
}
