//! Opening: the settings of a tier, and what the server must be to keep its promises (T2).

use std::{collections::HashMap, fmt, sync::Arc, time::Duration};

use ::redis::{
    AsyncConnectionConfig, Client, Cmd, ConnectionInfo, IntoConnectionInfo as _, ProtocolVersion,
    RedisResult, Value,
    cluster::ClusterClientBuilder,
    cluster_routing::{MultipleNodeRoutingInfo, RoutingInfo},
    io::tcp::{TcpSettings, socket2::TcpKeepalive},
};
use parking_lot::Mutex;
use tokio::time::timeout;

use super::{
    RedisTier, SHARDS, Shared,
    claims::Claims,
    ear::Ear,
    link::{Link, Server, To, refusal},
    step::{Names, Scripts},
};
use crate::tier::TierError;

/// What an acknowledged step survives (rule 11 of the contract; T2, T7).
///
/// These are the levels that the server has. They are not those of other tiers: with `everysec` a server
/// writes behind its answers too, so that a mere `kill -9` of it can cost a moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum RedisDurability {
    /// A loss of power: `appendonly yes`, `appendfsync always`, `no-appendfsync-on-rewrite no`. The
    /// server syncs a step before it answers.
    #[default]
    PowerLoss,
    /// A restart, but for what was acknowledged in the last two seconds before a crash of the server or
    /// a loss of power: `appendonly yes`, `appendfsync everysec` or `always`.
    EverySecond,
    /// Whatever the server does; nothing is asked. For caches of what can be lost, and for servers
    /// that do not show their settings.
    Unchecked,
}

/// The settings of a [`RedisTier`], made by [`RedisTier::builder`].
#[derive(Clone, Debug)]
#[must_use = "a builder does nothing until it connects"]
pub struct RedisBuilder {
    prefix: String,
    durability: RedisDurability,
    replicas: usize,
    answer_within: Duration,
}

impl RedisBuilder {
    pub(super) fn new() -> Self {
        Self {
            prefix: "oncekey".to_owned(),
            durability: RedisDurability::default(),
            replicas: 0,
            answer_within: Duration::from_secs(2),
        }
    }

    /// What all keys and channels begin with. Default `oncekey`. Processes that share records have
    /// the same; services that share a server only have different ones. It must not be empty and may
    /// not contain braces, because these decide where a cluster keeps a key.
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefix = prefix.into();
        self
    }

    /// What an acknowledged step must survive. Default [`RedisDurability::PowerLoss`]. A server that is
    /// set to less is refused.
    pub fn durability(mut self, durability: RedisDurability) -> Self {
        self.durability = durability;
        self
    }

    /// How many replicas must have received a step before it counts as done (`WAIT`). Default 0: a
    /// failover can lose what was acknowledged in its last moments. A step that too few have is
    /// [`TierError::Unavailable`], though it may have been done.
    ///
    /// It makes that loss rarer and does not rule it out: a failover may still choose a replica that
    /// has less. All steps of a process wait behind each other, each for a round trip to the replicas.
    pub fn replicas(mut self, replicas: usize) -> Self {
        self.replicas = replicas;
        self
    }

    /// How long one step may take, connecting included. Default 2 s: less than what
    /// [`TieredBuilder::answer_within`](crate::tier::TieredBuilder::answer_within) gives by default,
    /// so that a connection that went dead is noticed here.
    pub fn answer_within(mut self, limit: Duration) -> Self {
        self.answer_within = limit;
        self
    }

    /// Connects to a single server: `redis://[user:password@]host[:port][/database]` or
    /// `redis+unix:///path`. For `rediss://` (TLS), depend on the crate `redis` with its feature
    /// `tokio-rustls-comp` too.
    ///
    /// # Errors
    ///
    /// [`TierError::Unavailable`] if the server cannot be reached; [`TierError::Unusable`] if it is
    /// no primary, is a node of a cluster, may evict keys (any `maxmemory-policy` but `noeviction`),
    /// is less durable than asked, refuses one of the commands that the steps need, or if a setting
    /// here is out of its bounds. The text says what to do.
    pub async fn connect(self, url: &str) -> Result<RedisTier, TierError> {
        let info = self.parse(url)?;
        let client = Client::open(info.clone()).map_err(|error| refusal(&error))?;
        // Without a limit to answers: the link has one for the step as a whole.
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(self.answer_within))
            .set_response_timeout(None)
            .set_pipeline_buffer_size(1024);
        let to = To::Server(Box::new(Server::new(client, config, self.answer_within)));
        self.open(to, 1, &[info]).await
    }

    /// Connects to a cluster, by some of its nodes; the others are found.
    ///
    /// # Errors
    ///
    /// As [`connect`](Self::connect), of any of its primaries.
    pub async fn connect_cluster<U: AsRef<str>>(
        self,
        urls: impl IntoIterator<Item = U>,
    ) -> Result<RedisTier, TierError> {
        let urls = urls.into_iter();
        let infos = urls.map(|url| self.parse(url.as_ref())).collect::<Result<Vec<_>, _>>()?;
        let client = ClusterClientBuilder::new(infos.clone())
            .connection_timeout(self.answer_within)
            .response_timeout(self.answer_within)
            .tcp_settings(self.tcp())
            .retries(4)
            .min_retry_wait(20)
            .max_retry_wait(500)
            .build()
            .map_err(|error| refusal(&error))?;
        let connecting = timeout(self.answer_within, client.get_async_connection()).await;
        let connection = connecting
            .map_err(|_| TierError::unavailable("no node of the cluster answers"))?
            .map_err(|error| refusal(&error))?;
        self.open(To::Cluster(connection), SHARDS, &infos).await
    }

    fn parse(&self, url: &str) -> Result<ConnectionInfo, TierError> {
        // Without the URL in its text: a password may stand there.
        let info = url.into_connection_info().map_err(|error| refusal(&error))?;
        Ok(info.set_tcp_settings(self.tcp()))
    }

    /// A peer that is gone without a word is noticed by the kernel too.
    fn tcp(&self) -> TcpSettings {
        let keepalive = TcpKeepalive::new()
            .with_time(Duration::from_secs(15))
            .with_interval(Duration::from_secs(5));
        let tcp = TcpSettings::default().set_nodelay(true).set_keepalive(keepalive);
        #[cfg(any(target_os = "android", target_os = "fuchsia", target_os = "linux"))]
        let tcp = tcp.set_user_timeout(self.answer_within.max(Duration::from_secs(1)));
        tcp
    }

    async fn open(
        self,
        to: To,
        shards: u64,
        infos: &[ConnectionInfo],
    ) -> Result<RedisTier, TierError> {
        if self.prefix.is_empty() || self.prefix.contains(['{', '}']) {
            return Err(TierError::unusable("the prefix is empty or contains braces"));
        }
        if self.answer_within.is_zero() {
            return Err(TierError::unusable("`answer_within` is zero: no step could be done"));
        }
        let listeners = infos.iter().map(|info| {
            let settings = info.redis_settings().clone().set_protocol(ProtocolVersion::RESP3);
            Client::open(info.clone().set_redis_settings(settings))
        });
        let listeners = listeners.collect::<RedisResult<Vec<_>>>();
        let listeners = listeners.map_err(|error| refusal(&error))?;
        let link = Link { to, within: self.answer_within, replicas: self.replicas };
        self.check(&link).await?;
        let names = Names { prefix: self.prefix, shards };
        let scripts = Scripts::new();
        link.run(&scripts.probe, &names.of_probe(), &[]).await?;
        let shared = Shared {
            ear: Ear::new(listeners, self.answer_within),
            claims: Mutex::new(Claims::new()),
            vanished: Default::default(),
            names,
            link,
            scripts,
        };
        Ok(RedisTier { shared: Arc::new(shared) })
    }

    /// Refuses a server that would not keep what it is given.
    async fn check(&self, link: &Link) -> Result<(), TierError> {
        let infos = link.ask_all(&::redis::cmd("INFO")).await?;
        for (node, info) in &infos {
            let info = text(info)?;
            let says = |name: &str| {
                info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
            };
            let at = |what: fmt::Arguments<'_>| TierError::unusable(format!("{node}: {what}"));
            if says("loading") == Some("1") {
                return Err(TierError::unavailable("the server loads its data"));
            }
            if says("role").is_some_and(|role| role != "master") {
                return Err(at(format_args!("this is a replica: connect to the primary")));
            }
            if says("cluster_enabled") == Some("1") && matches!(link.to, To::Server(_)) {
                return Err(at(format_args!("this is a node of a cluster: use `connect_cluster`")));
            }
            let policy = says("maxmemory_policy").unwrap_or("unknown");
            if policy != "noeviction" {
                return Err(at(format_args!(
                    "the eviction policy is {policy}: it may drop live records, and work would run \
                     twice. Set `maxmemory-policy noeviction`"
                )));
            }
            if self.durability != RedisDurability::Unchecked && says("aof_enabled") != Some("1") {
                return Err(at(format_args!(
                    "there is no append-only file: a restart forgets what was acknowledged. Set \
                     `appendonly yes`, or ask for `RedisDurability::Unchecked`"
                )));
            }
        }
        self.check_sync(link).await?;
        if self.replicas > 0 {
            let mut wait = ::redis::cmd("WAIT");
            wait.arg(self.replicas).arg((self.answer_within / 4).as_millis().max(1) as u64);
            for (node, answer) in link.ask_all(&wait).await? {
                let have: usize = ::redis::from_redis_value(answer).unwrap_or(0);
                if have < self.replicas {
                    return Err(TierError::unavailable(format!(
                        "{node}: {have} replicas answer, {} are asked for",
                        self.replicas
                    )));
                }
            }
        }
        Ok(())
    }

    async fn check_sync(&self, link: &Link) -> Result<(), TierError> {
        let wanted: &[(&str, &[&str])] = match self.durability {
            // While the file is rewritten too.
            RedisDurability::PowerLoss => {
                &[("appendfsync", &["always"]), ("no-appendfsync-on-rewrite", &["no"])]
            }
            RedisDurability::EverySecond => &[("appendfsync", &["everysec", "always"])],
            RedisDurability::Unchecked => return Ok(()),
        };
        for (name, enough) in wanted {
            let mut config = ::redis::cmd("CONFIG");
            config.arg("GET").arg(name);
            let settings = link.ask_all(&config).await.map_err(|error| match error {
                TierError::Unusable(error) => TierError::unusable(format!(
                    "whether the server syncs what it acknowledges cannot be seen; if you know it, \
                     ask for `RedisDurability::Unchecked`: {error}"
                )),
                error => error,
            })?;
            for (node, setting) in settings {
                let setting: HashMap<String, String> =
                    ::redis::from_redis_value(setting).unwrap_or_default();
                let is = setting.get(*name).map_or("unknown", String::as_str);
                if !enough.contains(&is) {
                    let (asked, better) = (self.durability, enough[0]);
                    return Err(TierError::unusable(format!(
                        "{node}: `{name}` is {is}, which is less than {asked:?} asks for. Set it to \
                         `{better}`, or ask for less"
                    )));
                }
            }
        }
        Ok(())
    }
}

fn text(value: &Value) -> Result<String, TierError> {
    ::redis::from_redis_value(value.clone())
        .map_err(|_| TierError::unusable("the server does not tell what it is (`INFO`)"))
}

impl Link {
    /// The answers of the server, or of each primary of the cluster, by its address.
    async fn ask_all(&self, command: &Cmd) -> Result<Vec<(String, Value)>, TierError> {
        let asked = timeout(self.within, async {
            match &self.to {
                To::Server(server) => {
                    Ok(vec![("the server".to_owned(), server.send(command).await?)])
                }
                To::Cluster(cluster) => {
                    let to = (MultipleNodeRoutingInfo::AllMasters, None);
                    let mut cluster = cluster.clone();
                    let answers =
                        cluster.route_command(command.clone(), RoutingInfo::MultiNode(to));
                    match answers.await?.extract_error()? {
                        Value::Map(answers) => answers
                            .into_iter()
                            .map(|(node, answer)| Ok((::redis::from_redis_value(node)?, answer)))
                            .collect(),
                        other => Ok(vec![("the cluster".to_owned(), other)]),
                    }
                }
            }
        });
        let asked: RedisResult<_> =
            asked.await.map_err(|_| TierError::unavailable("Redis does not answer"))?;
        asked.map_err(|error| refusal(&error))
    }
}
