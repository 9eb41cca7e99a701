//! `/host`.

use hyper::Method;

use super::target::Target;
use super::{Answer, Client};
use crate::{Difference, Host, HostDrain, HostReconcile, Problem};

impl Client {
    /// The host and its daemon.
    pub async fn host(&self) -> Result<Host, Problem> {
        self.get(&Target::new("host")).await
    }

    /// Unplugs everything, before the host shuts down.
    pub async fn host_drain(&self, asked: &HostDrain) -> Result<Answer<serde_json::Value>, Problem> {
        self.begin(Method::POST, &Target::new("host/drain"), asked).await
    }

    /// Compares the disks that run with the catalogue.
    pub async fn host_reconcile(&self, asked: &HostReconcile) -> Result<Vec<Difference>, Problem> {
        self.change(Method::POST, &Target::new("host/reconcile"), asked).await
    }
}
