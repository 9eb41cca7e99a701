//! The image of a cloud-init seed: a FAT file system labelled `cidata`, as the data source NoCloud expects.
//!
//! It knows nothing about what the files say. Invariant: the same files give the same image, and it is made in memory
//! alone, because the files hold secrets.

use std::io::{self, Cursor, Write};

use fatfs::{FatType, FileSystem, FormatVolumeOptions, FsOptions};

/// The label by which cloud-init finds the file system.
pub const LABEL: &str = "cidata";

/// The same as FAT has it.
const PADDED: [u8; 11] = *b"cidata     ";

/// Three texts of 64 KiB, and what the file system needs.
const LEN: usize = 512 << 10;

/// An image with these files in its root directory.
pub fn image(files: &[(&str, &str)]) -> io::Result<Vec<u8>> {
    let mut disk = Cursor::new(vec![0; LEN]);
    // All three types are `vfat` for cloud-init; FAT12 is the one for this size.
    let options = FormatVolumeOptions::new().volume_label(PADDED).fat_type(FatType::Fat12);
    fatfs::format_volume(&mut disk, options)?;
    let file_system = FileSystem::new(&mut disk, FsOptions::new())?;
    for (name, text) in files {
        let mut file = file_system.root_dir().create_file(name)?;
        file.write_all(text.as_bytes())?;
        file.flush()?;
    }
    file_system.unmount()?;
    Ok(disk.into_inner())
}

#[cfg(test)]
mod test {
    use std::io::Read;
    use std::process::Command;

    use super::*;

    const FILES: [(&str, &str); 3] =
        [("meta-data", "instance-id: a\n"), ("user-data", "#cloud-config\n"), ("network-config", "version: 2\n")];

    fn read_back(image: Vec<u8>, name: &str) -> String {
        let file_system = FileSystem::new(Cursor::new(image), FsOptions::new()).unwrap();
        let mut text = String::new();
        file_system.root_dir().open_file(name).unwrap().read_to_string(&mut text).unwrap();
        text
    }

    #[test]
    fn an_image_has_the_label_and_the_files_under_their_names() {
        let made = image(&FILES).unwrap();
        let file_system = FileSystem::new(Cursor::new(made.clone()), FsOptions::new()).unwrap();
        assert_eq!(file_system.volume_label(), LABEL);
        assert_eq!(file_system.read_volume_label_from_root_dir().unwrap().as_deref(), Some(LABEL));
        for (name, text) in FILES {
            assert_eq!(read_back(made.clone(), name), text);
        }
        assert_eq!(image(&FILES).unwrap(), made);
    }

    #[test]
    fn the_largest_files_fit() {
        let text = "x".repeat(64 << 10);
        let made = image(&FILES.map(|(name, _)| (name, text.as_str()))).unwrap();
        assert_eq!(made.len(), LEN);
        for (name, _) in FILES {
            assert_eq!(read_back(made.clone(), name), text);
        }
    }

    /// What udev and cloud-init ask for the label.
    #[test]
    fn blkid_finds_the_label() {
        let room = tempfile::tempdir().unwrap();
        let path = room.path().join("seed.img");
        std::fs::write(&path, image(&FILES).unwrap()).unwrap();
        let Ok(output) = Command::new("blkid").args(["-p", "-o", "export"]).arg(&path).output() else {
            eprintln!("not run: there is no blkid; `make prepare` installs it");
            return;
        };
        let said = String::from_utf8(output.stdout).unwrap();
        assert!(said.contains("LABEL=cidata\n") && said.contains("TYPE=vfat\n"), "{said}");
    }
}
