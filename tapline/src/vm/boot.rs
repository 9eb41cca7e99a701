//! Options for what a machine boots.

use api::{Description, Problem};

use crate::session::Session;
use crate::word::{self, HostPath};

/// Options of a kernel on the host; none: boot from disk.
#[derive(Clone, Debug, clap::Args)]
#[group(skip)]
pub struct Boot {
    /// Boot this kernel on the host [default: boot the first bootable disk]
    #[arg(long, value_name = "PATH", value_parser = word::path)]
    kernel: Option<HostPath>,
    /// The kernel's initial ramdisk
    #[arg(long, value_name = "PATH", value_parser = word::path, requires = "kernel")]
    initrd: Option<HostPath>,
    /// The kernel's command line
    #[arg(long, value_name = "TEXT", requires = "kernel")]
    cmdline: Option<Description>,
}

impl Boot {
    /// The kernel, if one is given.
    pub fn kernel(self, session: &Session) -> Result<Option<api::Boot>, Problem> {
        let Boot { kernel, initrd, cmdline } = self;
        let Some(kernel) = kernel else { return Ok(None) };
        let initrd = initrd.map(|initrd| session.path(initrd)).transpose()?;
        Ok(Some(api::Boot::Kernel { kernel: session.path(kernel)?, initrd, cmdline: cmdline.unwrap_or_default() }))
    }
}

/// Formats the boot source.
pub fn shown(boot: &api::Boot) -> String {
    match boot {
        api::Boot::Disk => "its first bootable disk".into(),
        api::Boot::Kernel { kernel, initrd, cmdline } => {
            let initrd = initrd.as_ref().map(|initrd| format!("\ninitrd {initrd}")).unwrap_or_default();
            let cmdline = if cmdline.as_str().is_empty() { String::new() } else { format!("\n{cmdline}") };
            format!("kernel {kernel}{initrd}{cmdline}")
        }
    }
}
