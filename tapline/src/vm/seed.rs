//! Options for a machine's cloud-init seed. The files are read here, and the daemon keeps their contents.

use std::path::{Path, PathBuf};

use api::{Code, Problem, Seed, SeedText};

/// The files of a seed; none: no seed.
#[derive(Clone, Debug, clap::Args)]
#[group(skip)]
#[command(next_help_heading = "cloud-init")]
pub struct SeedFiles {
    /// User data for cloud-init in the guest, which finds it on a disk labelled cidata
    #[arg(long, value_name = "FILE")]
    user_data: Option<PathBuf>,
    /// Metadata [default: the machine's UUID as instance-id, its name as local-hostname]
    #[arg(long, value_name = "FILE", requires = "user_data")]
    meta_data: Option<PathBuf>,
    /// Network configuration
    #[arg(long, value_name = "FILE", requires = "user_data")]
    network_config: Option<PathBuf>,
}

impl SeedFiles {
    /// Reads the seed; `None` if no user data is given.
    pub fn seed(self) -> Result<Option<Seed>, Problem> {
        let SeedFiles { user_data, meta_data, network_config } = self;
        let optional = |file: Option<PathBuf>| file.map(|file| read(&file)).transpose();
        let Some(user_data) = optional(user_data)? else { return Ok(None) };
        Ok(Some(Seed { user_data, meta_data: optional(meta_data)?, network_config: optional(network_config)? }))
    }
}

fn read(file: &Path) -> Result<SeedText, Problem> {
    let tried = format!("read {}", file.display());
    let text = std::fs::read_to_string(file).map_err(|error| Problem::failed(&tried, error))?;
    text.try_into().map_err(|why: String| Problem::new(Code::Invalid, format!("cannot use {}: {why}", file.display())))
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_seed_is_read_from_its_files_and_an_unusable_file_is_named() {
        let room = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = room.path().join(name);
            std::fs::write(&path, text).unwrap();
            Some(path)
        };
        let none = SeedFiles { user_data: None, meta_data: None, network_config: None };
        assert_eq!(none.clone().seed().unwrap(), None);
        let files = SeedFiles { user_data: file("user", "#cloud-config\n"), network_config: file("net", "a"), ..none };
        let seed = files.clone().seed().unwrap().unwrap();
        assert_eq!((seed.user_data.as_str(), seed.meta_data), ("#cloud-config\n", None));
        let long = SeedFiles { meta_data: file("long", &"x".repeat(70_000)), ..files };
        let refused = long.seed().unwrap_err().detail;
        assert!(refused.contains("long: a text of a seed must have at most 65536 bytes"), "{refused}");
    }
}
