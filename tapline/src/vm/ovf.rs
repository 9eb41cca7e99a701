//! The description of a machine in an OVA: OVF (DMTF DSP0243), of which only what becomes a machine here is read.
//!
//! Hostile input: names are only compared with members of the archive, and never opened.

use api::{Code, Problem};
use roxmltree::{Document, Node};

/// Types of resources (CIM_ResourceAllocationSettingData.ResourceType).
const PROCESSOR: &str = "3";
const MEMORY: &str = "4";
const NETWORK: &str = "10";
const DISK: &str = "17";

/// A machine in an OVF.
#[derive(Debug, PartialEq, Eq)]
pub struct Ovf {
    /// Its name, if it has one.
    pub name: Option<String>,
    /// Memory in bytes.
    pub memory: Option<u64>,
    /// Number of processors.
    pub vcpus: Option<u64>,
    /// Its disks, in the order in which the guest finds them.
    pub disks: Vec<OvfDisk>,
    /// Number of network cards.
    pub cards: usize,
    /// Whether it boots by UEFI.
    pub is_uefi: bool,
}

/// A disk of the machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OvfDisk {
    /// The member of the archive with its image.
    File(String),
    /// An empty disk of this size in bytes.
    Empty(u64),
}

/// Reads a description.
pub fn parse(text: &str) -> Result<Ovf, Problem> {
    let refused = |why: String| Problem::new(Code::Invalid, format!("cannot import the machine of this OVF: {why}"));
    let document = Document::parse(text).map_err(|error| refused(error.to_string()))?;
    let systems: Vec<Node<'_, '_>> = all(document.root(), "VirtualSystem").collect();
    let [system] = systems[..] else {
        return Err(refused(format!("it describes {} machines, and must describe one", systems.len()))
            .advise("export each machine by itself"));
    };
    let items: Vec<Node<'_, '_>> = all(system, "Item").chain(all(system, "StorageItem")).collect();
    let of_type = |kind: &'static str| {
        items.iter().copied().filter(move |item| value(*item, "ResourceType").as_deref() == Some(kind))
    };
    let mut memory = None;
    if let Some(item) = of_type(MEMORY).next() {
        let unit = unit(value(item, "AllocationUnits").as_deref().unwrap_or("byte * 2^20"));
        let unit = unit.ok_or_else(|| refused("the unit of its memory is not understood".into()))?;
        memory = number(item, "VirtualQuantity").and_then(|count| count.checked_mul(unit));
    }
    // In the order of the controllers in the description, then of the places at each.
    let controller = |item: &Node<'_, '_>| {
        let parent = value(*item, "Parent");
        items.iter().position(|other| parent.is_some() && value(*other, "InstanceID") == parent)
    };
    let mut drives: Vec<Node<'_, '_>> = of_type(DISK).collect();
    drives.sort_by_key(|item| (controller(item), number(*item, "AddressOnParent")));
    let disks = drives.iter().map(|item| disk(&document, *item).map_err(refused)).collect::<Result<_, _>>()?;
    let is_uefi = all(system, "Config").any(|node| {
        attribute(node, "key") == Some("firmware") && attribute(node, "value").is_some_and(|to| to.starts_with("efi"))
    });
    let name = system.children().find(|node| node.tag_name().name() == "Name").and_then(|node| node.text());
    let name = name.or_else(|| attribute(system, "id")).map(|name| name.trim().to_owned());
    let vcpus = of_type(PROCESSOR).next().and_then(|item| number(item, "VirtualQuantity"));
    Ok(Ovf { name, memory, vcpus, disks, cards: of_type(NETWORK).count(), is_uefi })
}

/// The disk in which a drive has its data.
fn disk(document: &Document<'_>, drive: Node<'_, '_>) -> Result<OvfDisk, String> {
    let resource = value(drive, "HostResource").ok_or("a disk names no data")?;
    // `ovf:/disk/ID` or `/disk/ID`, and `ovf:/file/ID` for an image without an entry of its own.
    let path = resource.trim().trim_start_matches("ovf:");
    if let Some(file) = path.strip_prefix("/file/") {
        return member(document, file);
    }
    let id = path.strip_prefix("/disk/").ok_or_else(|| format!("'{resource}' is no disk"))?;
    let found = all(document.root(), "Disk").find(|node| attribute(*node, "diskId") == Some(id));
    let found = found.ok_or_else(|| format!("the disk '{id}' is missing"))?;
    if attribute(found, "parentRef").is_some() {
        return Err(format!("the disk '{id}' has a parent, and must be whole"));
    }
    match attribute(found, "fileRef") {
        Some(file) => member(document, file),
        None => {
            let size = attribute(found, "capacity").and_then(|capacity| capacity.trim().parse::<u64>().ok());
            let unit = unit(attribute(found, "capacityAllocationUnits").unwrap_or("byte"));
            let bytes = size.zip(unit).and_then(|(size, unit)| size.checked_mul(unit));
            bytes.map(OvfDisk::Empty).ok_or_else(|| format!("the size of the disk '{id}' is not understood"))
        }
    }
}

/// The member of the archive that a reference names.
fn member(document: &Document<'_>, id: &str) -> Result<OvfDisk, String> {
    let file = all(document.root(), "File").find(|node| attribute(*node, "id") == Some(id));
    let file = file.ok_or_else(|| format!("the file '{id}' is missing"))?;
    if let Some(how) = attribute(file, "compression").filter(|how| !matches!(*how, "" | "identity")) {
        return Err(format!("the file '{id}' is compressed by {how}, which is not supported"));
    }
    if attribute(file, "chunkSize").is_some() {
        return Err(format!("the file '{id}' is in several parts, which is not supported"));
    }
    let href = attribute(file, "href").ok_or_else(|| format!("the file '{id}' has no name"))?;
    if href.contains("://") {
        return Err(format!("the file '{id}' is not in the archive, but at {href}"));
    }
    Ok(OvfDisk::File(href.rsplit('/').next().unwrap_or(href).to_owned()))
}

/// Bytes of a unit: `byte * 2^20` (DSP0004), or a word of older versions.
fn unit(text: &str) -> Option<u64> {
    let text: String = text.chars().filter(|char| !char.is_whitespace()).collect::<String>().to_ascii_lowercase();
    match text.as_str() {
        "" | "byte" | "bytes" => return Some(1),
        "kilobytes" | "kb" => return Some(1 << 10),
        "megabytes" | "mb" => return Some(1 << 20),
        "gigabytes" | "gb" => return Some(1 << 30),
        _ => {}
    }
    let (base, power) = text.strip_prefix("byte*")?.split_once('^')?;
    base.parse::<u64>().ok()?.checked_pow(power.parse().ok()?)
}

fn all<'a, 'input>(of: Node<'a, 'input>, name: &'static str) -> impl Iterator<Item = Node<'a, 'input>> {
    of.descendants().filter(move |node| node.tag_name().name() == name)
}

/// An attribute of any namespace.
fn attribute<'a>(node: Node<'a, '_>, name: &str) -> Option<&'a str> {
    node.attributes().find(|attribute| attribute.name() == name).map(|attribute| attribute.value())
}

fn value(item: Node<'_, '_>, name: &str) -> Option<String> {
    let child = item.children().find(|node| node.tag_name().name() == name)?;
    child.text().map(|text| text.trim().to_owned())
}

fn number(item: Node<'_, '_>, name: &str) -> Option<u64> {
    value(item, name)?.parse().ok()
}

#[cfg(test)]
mod test {
    use super::*;

    const ITEMS: &str = r#"
      <Item><rasd:InstanceID>1</rasd:InstanceID><rasd:ResourceType>3</rasd:ResourceType>
        <rasd:VirtualQuantity>2</rasd:VirtualQuantity></Item>
      <Item><rasd:AllocationUnits>byte * 2^20</rasd:AllocationUnits><rasd:InstanceID>2</rasd:InstanceID>
        <rasd:ResourceType>4</rasd:ResourceType><rasd:VirtualQuantity>4096</rasd:VirtualQuantity></Item>
      <Item><rasd:InstanceID>3</rasd:InstanceID><rasd:ResourceType>6</rasd:ResourceType></Item>
      <Item><rasd:AddressOnParent>1</rasd:AddressOnParent><rasd:HostResource>ovf:/disk/vmdisk2</rasd:HostResource>
        <rasd:InstanceID>5</rasd:InstanceID><rasd:Parent>3</rasd:Parent><rasd:ResourceType>17</rasd:ResourceType></Item>
      <Item><rasd:AddressOnParent>0</rasd:AddressOnParent><rasd:HostResource>ovf:/disk/vmdisk1</rasd:HostResource>
        <rasd:InstanceID>4</rasd:InstanceID><rasd:Parent>3</rasd:Parent><rasd:ResourceType>17</rasd:ResourceType></Item>
      <Item><rasd:InstanceID>6</rasd:InstanceID><rasd:ResourceType>10</rasd:ResourceType></Item>"#;

    fn ovf(file: &str, items: &str) -> String {
        format!(
            r#"<?xml version="1.0"?>
<Envelope xmlns="http://schemas.dmtf.org/ovf/envelope/1" xmlns:ovf="http://schemas.dmtf.org/ovf/envelope/1"
  xmlns:rasd="http://schemas.dmtf.org/wbem/wscim/1/cim-schema/2/CIM_ResourceAllocationSettingData"
  xmlns:vmw="http://www.vmware.com/schema/ovf">
  <References>{file}</References>
  <DiskSection><Info>disks</Info>
    <Disk ovf:capacity="20" ovf:capacityAllocationUnits="byte * 2^30" ovf:diskId="vmdisk1" ovf:fileRef="file1"/>
    <Disk ovf:capacity="5" ovf:capacityAllocationUnits="byte * 2^30" ovf:diskId="vmdisk2"/>
  </DiskSection>
  <VirtualSystem ovf:id="vm"><Name>web server</Name>
    <VirtualHardwareSection>{items}<vmw:Config ovf:required="false" vmw:key="firmware" vmw:value="efi"/>
    </VirtualHardwareSection></VirtualSystem>
</Envelope>"#
        )
    }

    #[test]
    fn a_machine_is_read_with_its_disks_in_the_order_of_their_places() {
        let file = r#"<File ovf:href="web-disk1.vmdk" ovf:id="file1" ovf:size="1"/>"#;
        let disks = vec![OvfDisk::File("web-disk1.vmdk".into()), OvfDisk::Empty(5 << 30)];
        let (name, memory, vcpus) = (Some("web server".into()), Some(4 << 30), Some(2));
        assert_eq!(parse(&ovf(file, ITEMS)), Ok(Ovf { name, memory, vcpus, disks, cards: 1, is_uefi: true }));
    }

    #[test]
    fn what_is_not_understood_is_refused_by_name() {
        for (file, why) in [
            ("", "the file 'file1' is missing"),
            (r#"<File ovf:href="a.vmdk.gz" ovf:id="file1" ovf:compression="gzip"/>"#, "compressed by gzip"),
            (r#"<File ovf:href="a.vmdk" ovf:id="file1" ovf:chunkSize="7"/>"#, "in several parts"),
            (r#"<File ovf:href="https://a/b.vmdk" ovf:id="file1"/>"#, "not in the archive"),
        ] {
            assert!(parse(&ovf(file, ITEMS)).unwrap_err().detail.contains(why), "{why}");
        }
        assert!(parse("<Envelope/>").unwrap_err().detail.contains("describes 0 machines"));
        assert!(parse("<Envelope>").is_err());
    }

    #[test]
    fn units_are_those_of_the_standard_and_of_older_versions() {
        let found =
            ["byte * 2^20", "byte*2^30", "byte * 10^9", "MegaBytes", "byte", "furlong", "byte * 2^99"].map(unit);
        assert_eq!(found, [Some(1 << 20), Some(1 << 30), Some(1_000_000_000), Some(1 << 20), Some(1), None, None]);
    }
}
