//! Gossip, and what peers' behaviour is worth.

use crate::behaviour::topic_score;
use crate::driver::Driver;
use crate::score::{BAN, GOSSIP_POINTS};
use libp2p::gossipsub::{self, IdentTopic, MessageAcceptance, PublishError};
use starling_bootstrap::identity::peer_id_of_known;
use starling_bootstrap::node_id_of;
use starling_core::transport::Verdict;
use starling_protocol::NodeId;
use starling_protocol::wire::{GOSSIP_LEN_BYTES_MAX, Topic};
use std::time::Instant;

impl Driver {
    pub(crate) fn subscribe_wanted(&mut self) {
        for topic in self.shared.topics() {
            let name = topic.name();
            if self.topics.contains_key(&name) {
                continue;
            }
            let ident = IdentTopic::new(name.clone());
            let gossip = &mut self.swarm.behaviour_mut().gossip;
            if let Err(error) = gossip.set_topic_params(ident.clone(), topic_score()) {
                tracing::error!(topic = %name, %error, "topic parameters refused");
            }
            if let Err(error) = gossip.subscribe(&ident) {
                tracing::error!(topic = %name, %error, "cannot subscribe");
            }
            self.topics.insert(name, topic);
        }
    }

    pub(crate) fn publish(&mut self, topic: &Topic, body: Vec<u8>) {
        let name = topic.name();
        match self.swarm.behaviour_mut().gossip.publish(IdentTopic::new(name.clone()), body) {
            Ok(_) => {}
            // Alone: those who come later get it by request.
            Err(PublishError::NoPeersSubscribedToTopic) => tracing::trace!(topic = %name, "nobody listens"),
            Err(error) => tracing::warn!(topic = %name, %error, "gossip was not published"),
        }
    }

    pub(crate) fn on_gossip(&mut self, event: gossipsub::Event) {
        match event {
            gossipsub::Event::Message { propagation_source, message_id, message } => {
                let verdict = self.judge(&message);
                if verdict == Verdict::Reject
                    && let Some(sender) = node_id_of(&propagation_source)
                {
                    self.penalise(sender, GOSSIP_POINTS, "gossip that is wrong");
                }
                let acceptance = match verdict {
                    Verdict::Accept => MessageAcceptance::Accept,
                    Verdict::Ignore => MessageAcceptance::Ignore,
                    Verdict::Reject => MessageAcceptance::Reject,
                };
                let gossip = &mut self.swarm.behaviour_mut().gossip;
                gossip.report_message_validation_result(&message_id, &propagation_source, acceptance);
            }
            gossipsub::Event::SlowPeer { peer_id, .. } => {
                tracing::debug!(peer = %peer_id, "a peer does not keep up with gossip");
            }
            _ => {}
        }
    }

    fn judge(&self, message: &gossipsub::Message) -> Verdict {
        // Strict validation: there is a source, and its signature matches.
        let author = message.source.as_ref().and_then(node_id_of);
        let Some(author) = author else { return Verdict::Reject };
        if message.data.len() > GOSSIP_LEN_BYTES_MAX {
            return Verdict::Reject;
        }
        match (self.topics.get(message.topic.as_str()), self.shared.inbound()) {
            (Some(topic), Some(logic)) => logic.on_gossip(author, topic, &message.data),
            _ => Verdict::Ignore,
        }
    }

    /// Lowers a peer's score, and bans it when it is too low.
    pub(crate) fn penalise(&mut self, node: NodeId, points: f64, why: &str) {
        let now = Instant::now();
        let banned = self.scores.add(node, points, now);
        let total = self.scores.points(node, now);
        tracing::debug!(peer = %node.short(), points = total, %why, "a peer misbehaves");
        let peer = peer_id_of_known(node);
        self.swarm.behaviour_mut().gossip.set_application_score(&peer, -total);
        if banned {
            tracing::warn!(peer = %node, %why, "a peer is banned for {BAN:?}; the last offence is given");
            self.swarm.behaviour_mut().blocked.block_peer(peer);
        }
    }

    pub(crate) fn wear_off_scores(&mut self, now: Instant) {
        let (scored, unbanned) = self.scores.sweep(now);
        for (node, points) in scored {
            self.swarm.behaviour_mut().gossip.set_application_score(&peer_id_of_known(node), -points);
        }
        for node in unbanned {
            tracing::info!(peer = %node.short(), "a ban is over");
            self.swarm.behaviour_mut().blocked.unblock_peer(peer_id_of_known(node));
        }
    }

    /// gossipsub's score of a peer, which holds ours.
    pub(crate) fn score(&self, node: NodeId) -> Option<f64> {
        self.swarm.behaviour().gossip.peer_score(&peer_id_of_known(node))
    }
}
