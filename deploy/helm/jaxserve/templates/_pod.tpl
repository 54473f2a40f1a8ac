{{- /*
A pod's template, of (dict "root" $ "role" ROLE): server (all of one), leader (host 0 of several), worker (another host).
Why it is as it is: deploy/kubernetes has the same, with reasons.
*/ -}}
{{- define "jaxserve.podTemplate" -}}
{{- $root := .root }}
{{- $options := include "jaxserve.options" $root | fromYaml }}
{{- $isGroup := ne .role "server" }}
{{- $isTpu := eq $root.Values.accelerator.kind "tpu" }}
{{- $waitSeconds := ternary (get $options "dist-timeout" | default 0) 0 $isGroup }}
{{- $needsShm := and (eq $root.Values.accelerator.kind "gpu") (gt (int $root.Values.accelerator.perHost) 1) -}}
metadata:
  annotations:
    checksum/options: {{ include "jaxserve.options" $root | sha256sum }}
    {{- if not $root.Values.auth.existingSecret }}
    checksum/secret: {{ toYaml $root.Values.auth | sha256sum }}
    {{- end }}
    {{- with $root.Values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  labels:
    app: {{ $root.Release.Name }}
    {{- with $root.Values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  automountServiceAccountToken: false
  # preStop 5 s, the drain, replies that are still read 5 s, and room; of several hosts the others wait for host 0
  terminationGracePeriodSeconds: {{ add (get $options "shutdown-timeout-s" | default 20 | ceil) (ternary 40 25 $isGroup) }}
  {{- with $root.Values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  securityContext:
    {{- if $isTpu }}
    runAsUser: 0 # the chips are devices of root's
    {{- else }}
    runAsNonRoot: true
    runAsUser: 1000
    fsGroup: 1000
    seccompProfile: {type: RuntimeDefault}
    {{- end }}
  {{- with $root.Values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $root.Values.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $root.Values.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if eq .role "leader" }}
  initContainers: # host 0 listens at its name, which the cluster's DNS may not know at once
    - name: name
      image: {{ include "jaxserve.image" $root }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      command: [sh, -c, 'until getent hosts "$LWS_LEADER_ADDRESS"; do sleep 1; done']
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities: {drop: [ALL]}
  {{- end }}
  containers:
    - name: jaxserve
      image: {{ include "jaxserve.image" $root }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      args:
        - --config=/etc/jaxserve/server.yaml
        {{- if $isGroup }}
        - --nnodes=$(LWS_GROUP_SIZE)
        - --node-rank=$(LWS_WORKER_INDEX)
        - --dist-init-addr=$(LWS_LEADER_ADDRESS):30100 # and the two ports behind it
        {{- end }}
      env:
        {{- if $isGroup }}
        - name: JAXSERVE_DIST_SECRET
          valueFrom: {secretKeyRef: {name: {{ include "jaxserve.secretName" $root }}, key: dist-secret}}
        {{- end }}
        {{- if ne .role "worker" }}
        - name: JAXSERVE_API_KEY
          valueFrom: {secretKeyRef: {name: {{ include "jaxserve.secretName" $root }}, key: api-key}}
        {{- end }}
        {{- if not $root.Values.models.claim }}
        - name: HF_TOKEN
          valueFrom: {secretKeyRef: {name: {{ include "jaxserve.secretName" $root }}, key: hf-token, optional: true}}
        {{- end }}
        {{- range $name, $value := $root.Values.environment }}
        - name: {{ $name }}
          value: {{ $value | quote }}
        {{- end }}
      {{- if ne .role "worker" }}
      ports:
        - {name: http, containerPort: 30000}
      startupProbe: # loading and compiling, and of several hosts the others' coming
        httpGet: {path: /health, port: http}
        periodSeconds: 10
        failureThreshold: {{ div (add $root.Values.startupSeconds $waitSeconds 9) 10 }}
      readinessProbe:
        httpGet: {path: /ready, port: http}
        periodSeconds: 5
      livenessProbe:
        httpGet: {path: /health, port: http}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 6
      lifecycle:
        preStop: {exec: {command: [sleep, "5"]}} # until nobody is sent here any more
      {{- end }}
      securityContext:
        {{- if $isTpu }}
        privileged: true # the driver locks more memory than others may
        {{- else }}
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities: {drop: [ALL]}
        {{- end }}
      resources:
        {{- include "jaxserve.resources" $root | nindent 8 }}
      volumeMounts:
        - {name: options, mountPath: /etc/jaxserve, readOnly: true}
        {{- if $root.Values.models.claim }}
        - {name: models, mountPath: /models, readOnly: true}
        {{- end }}
        - {name: cache, mountPath: /cache}
        - {name: tmp, mountPath: /tmp} # sockets
        {{- if $needsShm }}
        - {name: shm, mountPath: /dev/shm}
        {{- end }}
  volumes:
    - name: options
      configMap: {name: {{ $root.Release.Name }}}
    {{- if $root.Values.models.claim }}
    - name: models
      persistentVolumeClaim: {claimName: {{ $root.Values.models.claim }}{{ if $isGroup }}, readOnly: true{{ end }}}
    {{- end }}
    - name: cache
      persistentVolumeClaim: {claimName: {{ $root.Values.cache.claim | default (printf "%s-cache" $root.Release.Name) }}}
    - name: tmp
      emptyDir: {}
    {{- if $needsShm }}
    - name: shm # NCCL's, between the GPUs of a node: containers have 64 MB by default
      emptyDir: {medium: Memory}
    {{- end }}
{{- end }}
