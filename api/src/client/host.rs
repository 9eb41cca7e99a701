//! `/host`.

use hyper::Method;

use super::target::Target;
use super::{Answer, Client};
use crate::{Backup, Difference, Host, HostDrain, HostReconcile, Problem};

impl Client {
    /// Gets the host and its daemon.
    pub async fn host(&self) -> Result<Host, Problem> {
        self.get(&Target::new("host")).await
    }

    /// Gets the daemon's version, also from a daemon whose other answers this client cannot read.
    pub async fn daemon_version(&self) -> Result<String, Problem> {
        let host: serde_json::Value = self.get(&Target::new("host")).await?;
        let version = host.get("version").and_then(serde_json::Value::as_str);
        version.map(str::to_owned).ok_or_else(|| Problem::failed("get the daemon's version", "it has none"))
    }

    /// Unplugs everything before the host shuts down.
    pub async fn host_drain(&self, asked: &HostDrain) -> Result<Answer<serde_json::Value>, Problem> {
        self.begin(Method::POST, &Target::new("host/drain"), asked).await
    }

    /// Compares running disks with the catalogue.
    pub async fn host_reconcile(&self, asked: &HostReconcile) -> Result<Vec<Difference>, Problem> {
        self.change(Method::POST, &Target::new("host/reconcile"), asked).await
    }

    /// Lists the backups of the catalogue, the newest first.
    pub async fn host_backups(&self) -> Result<Vec<Backup>, Problem> {
        self.get(&Target::new("host/backups")).await
    }

    /// Creates a backup of the catalogue.
    pub async fn host_backup(&self) -> Result<Backup, Problem> {
        self.change(Method::POST, &Target::new("host/backups"), &serde_json::json!({})).await
    }
}
